"""Random numbers that differ between ranks, are derived from one seed, and can be resumed.

With the same `torch.manual_seed` on all ranks, all draw the same dropout masks and augmentations,
unlike a single rank on the whole batch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchmn.data import rng_state
from torchmn.errors import RankMismatchError, UsageError

if TYPE_CHECKING:
    from torchmn.comm import Communicator


_NUM_SEEDS = 2**32  # numpy's


class RandomStreams:
    """The generators of this rank: Python's, numpy's, torch's on the CPU and on its GPU.

    Made by `seed_ranks`. A checkpointer saves the generators by itself; for files of your own
    ``state_dict()``, on every rank, is plain values and tensors.

    Example:
        >>> streams = torchmn.seed_ranks(0, comm)
        >>> state = streams.state_dict()
        >>> first = torch.rand(2)
        >>> streams.load_state_dict(state)
        >>> torch.equal(torch.rand(2), first)
        True
    """

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self.seed = _rank_seed(seed, rank)
        """The seed of this rank, 0 .. 2**32 - 1, for generators of your own."""
        self._job_seed = seed
        self._rank = rank
        self._device = device
        random.seed(self.seed)
        np.random.seed(self.seed)
        torch.manual_seed(self.seed)

    def state_dict(self) -> dict[str, Any]:
        """Where all streams are now. Local."""
        return rng_state.capture(self._device)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the numbers that would have come next. Local."""
        if "begin" in state:
            seed, step = state["begin"]
            rng_state.start(seed, step, self._rank, self._device)
            return
        rng_state.restore(state, self._device)

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], comm: Communicator
    ) -> Mapping[str, Any]:
        """The state that this rank loads, from those of all old ranks, in rank order. Local.

        A rank that was there before continues with its own streams; a new one begins streams that
        no other rank has.
        """
        if comm.rank < len(states):
            return states[comm.rank]
        position = hashlib.sha256(bytes(states[0]["torch"].tolist())).digest()[:4]
        return {"begin": (self._job_seed, int.from_bytes(position, "little"))}


def seed_ranks(seed: int, comm: Communicator) -> RandomStreams:
    """Seed Python's, numpy's and torch's generators, differently on each rank. *Collective.*

    Use it in place of ``torch.manual_seed(seed)``. Rank 0 draws the numbers of
    ``torch.manual_seed(seed)``, so that a model starts with the same parameters on any number of
    ranks (rank 0's are used); dropout masks and augmentations differ between ranks, also in the
    workers of a DataLoader, which torch seeds from the generator of their rank. Seed your own
    generators with the rank's seed: ``torch.Generator().manual_seed(streams.seed)``.

    Args:
        seed: 0 .. 2**32 - 1, the same on all ranks.
        comm: gives rank and device.

    Raises:
        UsageError: ``seed`` is out of range.
        RankMismatchError: ranks passed different seeds; all ranks raise.

    >>> streams = seed_ranks(0, comm)
    """
    is_seed = isinstance(seed, (int, np.integer)) and 0 <= int(seed) < _NUM_SEEDS
    everyone = comm.allgather_obj(int(seed) if is_seed else repr(seed))
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise RankMismatchError(
                f"{comm.rank_label}: seed_ranks got {everyone[0]} on rank 0 and {theirs} on rank "
                f"{rank}. Give all ranks one seed: the ranks' own seeds are derived from it."
            )
    if not is_seed:
        raise UsageError(
            f"{comm.rank_label}: seed_ranks got {seed!r}. It needs an integer from 0 to 2**32 - 1."
        )
    return RandomStreams(int(seed), comm.rank, comm.device)


def _rank_seed(seed: int, rank: int) -> int:
    """Rank 0's is the seed itself; the others' are far apart, whatever seeds a script tries."""
    if rank == 0:
        return seed
    digest = hashlib.sha256(f"torchmn rank {rank} seed {seed}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
