"""Every step, overlapped with the next forward pass as well."""

from torchmn.schedules.next_forward.schedule import EveryStepNextForward

__all__ = ["EveryStepNextForward"]
