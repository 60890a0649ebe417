"""What all ranks must do between the same two exchanges, or none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torchmn.base.errors import RankMismatchError
from torchmn.exchange.agreements.base import Agreement, PassContext


class Together(Agreement):
    """Something that all ranks must do between the same two exchanges, or none of them."""

    num_values = 2
    what: ClassVar[str]  # what only some ranks did, after "rank 1 ", and what to do about it
    is_idle = True

    def note(self) -> None:
        """Let the next exchange tell the other ranks that this one did it."""
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
        """How many ranks must do it if one does."""
        return self.comm.size
