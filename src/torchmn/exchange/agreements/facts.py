"""Facts that ranks tell each other at an exchange; they are used, not checked."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

from torchmn.base.errors import RankMismatchError
from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.buckets import Slot
from torchmn.exchange.finiteness import Finiteness

_has_gradient = attrgetter("has_gradient")

NO_JOINT_PASS = (
    "several optimizers share a backward pass, which a rank has left out in this step. They "
    "exchange in the order in which the pass reaches the parameters, and that rank does not know "
    "it. Call backward() on all ranks: a batch of 0 rows will do. Or use one optimizer with a "
    "parameter group for each."
)


class FiniteGradients(Agreement):
    """The number of gradients of a rank that are not finite. One object for each set of buckets.

    Raises nothing: `gather_nonfinite` later collects the names from the ranks.
    """

    def __init__(self) -> None:
        self.finiteness = Finiteness()

    @property
    def are_all_finite(self) -> bool:
        """Whether all gradients were finite on all ranks, and all that a codec made of them."""
        return self.finiteness.is_valid and self.sums[0] == 0

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`: gradients on a device are counted there."""
        own = self.finiteness
        return () if own.on_device else (float(len(own.found_here)),)

    def write_values(self, values: Tensor, context: PassContext) -> None:
        """See `Agreement.write_values`."""
        values[0] = self.finiteness.count(values.device)


class Presence(Agreement):
    """For each parameter, the number of ranks with a gradient. One object for each set."""

    slots: Sequence[Slot] = ()  # in the order of the values; set once the buckets exist

    def __init__(self, num_parameters: int) -> None:
        self.num_values = num_parameters

    @property
    def are_present(self) -> list[bool]:
        """Whether any rank had a gradient, for each of `slots`."""
        return [num != 0.0 for num in self.sums]

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        if not context.is_active:
            return (0.0,) * self.num_values
        return [*map(_has_gradient, self.slots)]


class LateRanks(Agreement):
    """Whether a rank makes this exchange in `step`, or in a pass that several optimizers share.

    Late ranks, which make it in `step`, take over the gradients of another rank; see
    `share_with_late_ranks`. One object for each set of buckets.
    """

    num_values = 2
    is_idle = True
    is_late = False  # whether this rank makes the exchange in `step`
    has_gradients = True  # whether this rank has any gradient to exchange, if it is late
    _is_joint = False

    @property
    def are_some_late(self) -> bool:
        """Whether some of the active ranks are late, but not all of them."""
        return 0 < round(self.sums[0]) < self.num_active

    def note(self, *, is_late: bool, has_gradients: bool, is_joint: bool) -> None:
        """Set the facts of this rank for the exchange that it is about to make."""
        self.is_late, self.has_gradients, self._is_joint = is_late, has_gradients, is_joint
        self.is_idle = not (is_late or is_joint)

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        return float(self.is_late and context.is_active), float(self._is_joint)

    def check(self, context: PassContext) -> None:
        """See `Agreement.check`: late ranks do not know in which order a joint pass exchanges."""
        are_some_without_data = 0 < self.num_active < self.comm.size
        if self.sums[1] and (self.are_some_late or are_some_without_data):
            raise RankMismatchError(f"{self.comm.rank_label}: {NO_JOINT_PASS}")
