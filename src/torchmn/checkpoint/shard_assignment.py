"""Which rank writes which tensors: shared ones are written once, balanced over ranks by bytes."""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.checkpoint.shard_file import TensorEntry


def owners(catalogues: Sequence[Sequence[TensorEntry]]) -> list[dict[str, int]]:
    """For every rank, the rank that writes each of its tensors, by name. The same on all ranks.

    Tensors are the same if name, dtype, shape and checksum are. One of the ranks that have it
    writes it: the one with the fewest bytes so far, large tensors first.
    """
    holders: dict[TensorEntry, list[int]] = {}
    for rank, catalogue in enumerate(catalogues):
        for entry in catalogue:
            holders.setdefault(entry, []).append(rank)
    result: list[dict[str, int]] = [{} for _ in catalogues]
    written_nbytes = [0] * len(catalogues)
    # First tensors that only one rank has; the shared ones then balance the load.
    for entry in sorted(holders, key=lambda e: (len(holders[e]) > 1, -e.nbytes)):
        ranks = holders[entry]
        owner = min(ranks, key=lambda rank: written_nbytes[rank])
        written_nbytes[owner] += entry.nbytes
        for rank in ranks:
            result[rank][entry.name] = owner
    return result
