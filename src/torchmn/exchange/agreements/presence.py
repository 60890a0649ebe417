"""Which parameters have a gradient on any rank."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.buckets import Slot

_has_gradient = attrgetter("has_gradient")


class Presence(Agreement):
    """A number for each parameter: on how many ranks it has a gradient. One object for each set."""

    slots: Sequence[Slot] = ()  # in the order of the numbers; set once the buckets are there

    def __init__(self, num_parameters: int) -> None:
        self.num_values = num_parameters

    @property
    def are_present(self) -> list[bool]:
        """Whether any rank had a gradient, for every one of `slots`."""
        return [num != 0.0 for num in self.sums]

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        if not context.is_active:
            return (0.0,) * self.num_values
        return [*map(_has_gradient, self.slots)]
