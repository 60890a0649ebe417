"""What keeps a training alive: leaving in time before a scheduler ends the job."""

from torchmn.resilience.preemption import SAVED_STATUS, Preemption

__all__ = ["SAVED_STATUS", "Preemption"]
