"""Ranks that make an exchange in `step`, as no backward pass of theirs made it."""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.exchange.agreements.base import Agreement, PassContext


class LateRanks(Agreement):
    """Whether a rank makes this exchange in `step`, or in a pass of several optimizers.

    The others' gradients are given to late ranks; see `share_with_late_ranks`. One object for each
    set of buckets.
    """

    num_values = 2
    is_idle = True
    is_late = False  # whether this rank makes it in `step`
    has_gradients = True  # whether this rank has any gradient to exchange, if it is late
    _is_joint = False

    @property
    def are_some_late(self) -> bool:
        """Whether some of the active ranks are late, and not all of them."""
        return 0 < round(self.sums[0]) < self.num_active

    @property
    def are_joint(self) -> bool:
        """Whether other optimizers exchange in the backward pass of any rank."""
        return self.sums[1] > 0

    def note(self, *, is_late: bool, has_gradients: bool, is_joint: bool) -> None:
        """What this rank does in the exchange that it is about to make."""
        self.is_late, self.has_gradients, self._is_joint = is_late, has_gradients, is_joint
        self.is_idle = not (is_late or is_joint)

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        return float(self.is_late and context.is_active), float(self._is_joint)
