"""Every step, hidden behind the next forward pass as well."""

from torchmn.exchange.next_forward.every_step_next_forward import EveryStepNextForward

__all__ = ["EveryStepNextForward"]
