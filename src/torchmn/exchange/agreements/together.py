"""Agreements on actions that all ranks must take between the same two exchanges, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torchmn.base.errors import RankMismatchError
from torchmn.exchange.agreements.base import Agreement, PassContext


class Together(Agreement):
    """An action that all ranks must take between the same two exchanges, or none of them.

    The values are 1 on a rank that took it, and its rank plus 1, which names it if it was alone.
    """

    num_values = 2
    what: ClassVar[str]  # the action, to follow "rank 1 ", and the cure if only some ranks took it
    is_idle = True

    def note(self) -> None:
        """Let the next exchange tell the other ranks that this rank took the action."""
        self.is_idle = False

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        self.is_idle = True
        return 1.0, float(self.comm.rank + 1)

    def check(self, context: PassContext) -> None:
        """See `Agreement.check`."""
        num_done = round(self.sums[0])
        if num_done < self.num_expected:
            ranks = f"{num_done} of {self.comm.size} ranks each"
            if num_done == 1:
                ranks = f"rank {round(self.sums[1]) - 1}"
            raise RankMismatchError(f"{self.comm.rank_label}: {ranks} {self.what}.")

    @property
    def num_expected(self) -> int:
        """The number of ranks that must take the action if one does."""
        return self.comm.size


class GivenUp(Together):
    """Whether a rank gave up the backward pass of this exchange because it raised."""

    voids_exchange = True
    what = (
        "raised an exception in its backward pass, so there are no means of this step. Handle the "
        "exception on all ranks, for instance by a collective that informs the others, and skip or "
        "repeat the step on all"
    )


class OtherLayout(Together):
    """Whether a rank's parameters no longer fit the layout of its buckets."""

    voids_exchange = True
    what = (
        "changed the dtype, device, shape or requires_grad of its parameters since the last "
        "exchange. Do the same on all ranks, between the same steps"
    )


class LoadedState(Together):
    """Whether a rank has loaded an optimizer state. Ranks that have left their loops need not."""

    what = (
        "loaded an optimizer state since the last exchange. Call load_state_dict() on all ranks, "
        "between the same steps, or only before create_multi_node_optimizer, which gives all ranks "
        "the state of rank 0"
    )

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        return super().contribute(context) if context.is_active else (0.0, 0.0)

    @property
    def num_expected(self) -> int:
        """See `Together.num_expected`."""
        return self.num_active
