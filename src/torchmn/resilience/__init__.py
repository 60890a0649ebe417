"""What keeps a training alive: an end in seconds with the cause named, and leaving in time."""

from torchmn.resilience.crash import install_crash_handler
from torchmn.resilience.preemption import SAVED_STATUS, Preemption

__all__ = ["SAVED_STATUS", "Preemption", "install_crash_handler"]
