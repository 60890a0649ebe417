"""Arguments that must be the same on all ranks, and valid on each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchmn.base.errors import RankMismatchError, UsageError

if TYPE_CHECKING:
    from torchmn.comm import Communicator


def raise_if_ranks_differ(
    comm: Communicator, caller: str, own: Mapping[str, object], *, problem: str = "", cure: str = ""
) -> None:
    """Compare values of this rank with those of rank 0, by name. *Collective.*

    Args:
        comm: the ranks.
        caller: the public function, for the error.
        own: the values; all ranks have the same names, unless one of them has a problem.
        problem: what is wrong with this rank's argument, after "rank 1 passed".
        cure: in place of the rule that all ranks pass the same value.

    Raises, on all ranks: UsageError, a rank has a problem; RankMismatchError, a value differs.
    """
    gathered: list[tuple[str, dict[str, Any]]] = comm.allgather_obj((problem, dict(own)))
    for rank, (found, _) in enumerate(gathered):
        if found:
            raise UsageError(f"{caller}: rank {rank} passed {found}")
    first = gathered[0][1]
    for rank, (_, values) in enumerate(gathered):
        for name in first:
            if values.get(name) != first[name]:
                raise RankMismatchError(
                    f"{caller}: {name} is {first[name]} on rank 0 and "
                    f"{values.get(name)} on rank {rank}. {cure or 'Pass the same on all ranks.'}"
                )
