"""Which parameters have a gradient on any rank."""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.buckets import Slot


class Presence(Agreement):
    """A number for each parameter: on how many ranks it has a gradient. One object for each set."""

    slots: Sequence[Slot] = ()
    """In the order of the numbers; set once the buckets are there."""

    def __init__(self, num_parameters: int) -> None:
        self.num_values = num_parameters

    @property
    def are_present(self) -> list[bool]:
        """Whether any rank had a gradient, for every one of `slots`."""
        return [num != 0.0 for num in self.sums]

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        is_active = context.is_active
        return [float(slot.has_gradient and is_active) for slot in self.slots]
