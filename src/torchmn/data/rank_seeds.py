"""Random numbers of ranks, derived from one seed: the same until training begins, then different.

What comes before the first step (splits of the data, initial values, masks, features) must be that
of one process, and so all ranks draw the same numbers for it. Dropout masks and augmentations must
differ between ranks, unlike under the same `torch.manual_seed` on all of them.
"""

from __future__ import annotations

import hashlib
import os
import random
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from torchmn.comm.training_start import training_start
from torchmn.data import rng_state
from torchmn.data.equal_arguments import raise_if_ranks_differ

if TYPE_CHECKING:
    from torchmn.comm import Communicator


_NUM_SEEDS = 2**32  # numpy's
_CPU = torch.device("cpu")
_PROCESS = secrets.token_hex(8)
_NUM_APART = "num_apart"
"""The key that a state has only if the ranks share their numbers."""


def position(state: torch.Tensor | None = None) -> int:
    """Hash the state of a torch generator, by default the CPU's, to 32 bits. Local."""
    if state is None:
        with rng_state.in_turn:
            state = torch.get_rng_state()
    raw = bytes(state.tolist())
    return int.from_bytes(hashlib.sha256(raw).digest()[:4], "little")


def rank_seed(seed: int, rank: int) -> int:
    """Derive a rank's seed: the seed itself on rank 0, a hash of seed and rank elsewhere. Local.

    With ``seed + rank``, a run with the next seed would repeat the numbers of other ranks.
    """
    if rank == 0:
        return seed
    digest = hashlib.sha256(f"torchmn rank {rank} seed {seed}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def rank_generator(generator: torch.Generator | None, rank: int) -> torch.Generator | None:
    """The generator of a DataLoader on a rank: ranks other than 0 get one of their own. Local.

    It seeds the workers, whose augmentation would be the same on all ranks.
    """
    if rank == 0 or generator is None:
        return generator
    own = torch.Generator(device="cpu")
    return own.manual_seed(rank_seed(generator.initial_seed(), rank))


class RandomStreams:
    """The generators of this rank: Python's, numpy's, torch's on the CPU and on its GPU.

    Made by `seed_ranks`. A checkpointer saves the generators by itself; to save them in files of
    your own, call ``state_dict()`` on every rank, which returns plain values and tensors.

    Example:
        >>> streams = torchmn.seed_ranks(0, comm)
        >>> state = streams.state_dict()
        >>> first = torch.rand(2)
        >>> streams.load_state_dict(state)
        >>> torch.equal(torch.rand(2), first)
        True
    """

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self.seed = rank_seed(seed, rank)
        """The seed of this rank, 0 .. 2**32 - 1, for generators of your own."""
        self.is_shared = True
        """Whether all ranks draw the same numbers: until training begins, or `fork`."""
        self._job_seed = seed
        self._rank = rank
        self._device = device
        self._num_apart = 0
        self._together: dict[str, Any] | None = None
        """State of the shared generators while this rank draws its own numbers, else None."""
        self._first = torch.empty(0, device="cpu")
        """State of torch's generator at the beginning of this rank's own numbers."""

    def seed_generators(self) -> RandomStreams:
        """Seed all generators as one process does, equally on all ranks; return self. Local."""
        random.seed(self._job_seed)
        np.random.seed(self._job_seed)
        with rng_state.in_turn:
            torch.manual_seed(self._job_seed)
        return self

    def fork(self) -> None:
        """Let each rank draw different numbers from now on; rank 0 continues as before. Local.

        It happens by itself at the first forward pass in training mode of a model of a multi-node
        optimizer, or at its first step. Call it, on all ranks, where they must draw different
        numbers before, as for rollouts before the first update. Calling it again does nothing.
        """
        was_shared, self.is_shared = self.is_shared, False
        if was_shared and self._rank > 0:
            self._begin_own(f"fork {position()}")
        self.draw_together()

    def state_dict(self) -> dict[str, Any]:
        """The state of all generators, and whether the ranks share their numbers. Local."""
        state = rng_state.capture(self._device)
        return {**state, _NUM_APART: self._num_apart} if self.is_shared else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the numbers that would have come next. Local."""
        if "begin" in state:
            seed, step = state["begin"]
            rng_state.start(seed, step, self._rank, self._device)
        else:
            rng_state.restore(state, self._device)
        self.loaded(state)

    def loaded(self, state: Mapping[str, Any]) -> None:
        """Note that the generators have been set to the state of a `state_dict`. Local."""
        self._num_apart, self._together = state.get(_NUM_APART, 0), None
        self.is_shared = _NUM_APART in state and self is not _NONE

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], comm: Communicator
    ) -> Mapping[str, Any]:
        """The state that this rank loads, from those of all old ranks, in rank order. Local.

        A rank that was there before continues with its own streams; a new one begins streams that
        no other rank has, or shares those that all ranks share.
        """
        if comm.rank < len(states) or _NUM_APART in states[0]:
            return states[comm.rank % len(states)]
        return {"begin": (self._job_seed, position(states[0]["torch"]))}

    # ---- for loaders, while numbers are shared ----

    def draw_apart(self) -> None:
        """Draw numbers that no other rank draws until `draw_together`, if they are shared. Local.

        Ranks read different samples and may draw a different number of random numbers for them;
        after that, shared generators would no longer agree.
        """
        if not self.is_shared or self._together is not None:
            return
        self._together = rng_state.capture(self._device)
        self._num_apart += 1
        self._begin_own(f"apart {self._num_apart} {position()}")
        self._first = torch.get_rng_state()

    def draw_together(self, *, has_seed_of_workers: bool = False) -> None:
        """Continue with the shared numbers where `draw_apart` has left them. Local.

        With ``has_seed_of_workers``, a number that torch has drawn meanwhile as the seed of a
        DataLoader's workers counts as drawn from the shared ones, as on rank 0.
        """
        state, self._together = self._together, None
        if state is None or (self._rank > 0 and not self.is_shared):
            return
        has_drawn = has_seed_of_workers and not torch.equal(torch.get_rng_state(), self._first)
        rng_state.restore(state, self._device)
        if has_drawn:
            torch.empty((), dtype=torch.int64, device="cpu").random_()

    # ---- inside ----

    def _begin_own(self, text: str) -> None:
        # A worker of a DataLoader, a forked process, cannot use the GPU.
        device = self._device if get_worker_info() is None else _CPU
        rng_state.start(text, 0, self._rank, device)


_NONE = RandomStreams(0, 0, _CPU)
"""Stands in where nothing is shared: without a seed, with one rank, or in ranks as threads."""
_NONE.is_shared = False
_current = _NONE


def current() -> RandomStreams:
    """Return the streams of this process. Local."""
    return _current


def adopt(streams: RandomStreams | None) -> None:
    """Set the streams of this process; None removes them. Local."""
    global _current
    _current = streams or _NONE
    training_start.function = None if streams is None else streams.fork


def shared_state() -> dict[str, Any] | None:
    """The state of the generators that all ranks share; None if they share none. Local."""
    return rng_state.capture(_current._device) if _current.is_shared else None


def follow(state: Mapping[str, Any] | None) -> None:
    """Continue from the `shared_state` of another rank, if numbers are shared. Local.

    Generators come to differ when one rank alone reads a sample, or draws the order of a pass for
    all ranks.
    """
    if state is not None and _current.is_shared:
        rng_state.restore(state, _current._device)


def fork_in_worker(streams: RandomStreams | None) -> None:
    """Let a DataLoader's worker draw numbers that no worker of another rank draws. Local.

    Does nothing in the process of a rank: it is for data of which each rank has its part, in
    DataLoaders whose workers torch seeds from shared numbers.

    Args:
        streams: the streams of the rank's process, for a worker that was not forked from it.
    """
    streams = streams or _current
    if streams.is_shared and get_worker_info() is not None:
        streams.fork()


def capture(device: torch.device) -> dict[str, Any]:
    """The state of this process's generators for a checkpoint, marked if it is shared. Local."""
    return _current.state_dict() if _current.is_shared else rng_state.capture(device)


def restore(state: Mapping[str, Any], step: int, comm: Communicator, num_old: int) -> None:
    """Restore the generators from a checkpoint. Local.

    A rank that did not exist when it was saved derives new numbers from the seed of rank 0.

    Args:
        state: what this rank, or for a new one rank 0, has captured.
        step: the step at which it was saved.
        comm: the ranks now.
        num_old: the number of ranks then.
    """
    if comm.rank < num_old or _NUM_APART in state:
        rng_state.restore(state, comm.device)
    else:
        rng_state.start(state["seed"], step, comm.rank, comm.device)
    _current.loaded(state)


def process_id() -> str:
    """An identifier of this process, equal only on ranks that are its threads. Local."""
    return f"{_PROCESS} {os.getpid()}"


def seed_ranks(seed: int, comm: Communicator) -> RandomStreams:
    """Seed Python's, numpy's and torch's generators for training on many ranks. *Collective.*

    Use it in place of ``torch.manual_seed(seed)``. All ranks draw the numbers of
    ``torch.manual_seed(seed)``, so that splits of the data, initial parameters and masks are those
    of one process, until training begins. From then on rank 0 continues, and each other rank has
    numbers of its own: dropout masks and augmentations differ.

    Training begins at the first forward pass in training mode, with gradients enabled, of a model
    of `create_multi_node_optimizer`, or at the latest at its first step. Looking at a batch, a mean
    over the data and an evaluation are not training. Workers of a DataLoader with the batches of
    `scatter_loader` or `GlobalSampler`, or of a shard of `scatter_dataset`, always draw different
    numbers on each rank. Call `RandomStreams.fork` where ranks must draw different numbers
    before. Seed your own generators with the rank's seed:
    ``torch.Generator().manual_seed(streams.seed)``.

    A second call starts again with numbers that all ranks share.

    Args:
        seed: 0 .. 2**32 - 1, the same on all ranks.
        comm: gives rank and device.

    Raises:
        UsageError: ``seed`` is out of range.
        RankMismatchError: ranks passed different seeds; all ranks raise.

    >>> streams = seed_ranks(0, comm)
    """
    is_seed = isinstance(seed, (int, np.integer)) and 0 <= int(seed) < _NUM_SEEDS
    raise_if_ranks_differ(
        comm,
        "seed_ranks",
        {"seed": int(seed) if is_seed else repr(seed)},
        problem="" if is_seed else f"{seed!r}. It needs an integer from 0 to 2**32 - 1.",
        cure="Give all ranks one seed: the ranks' own seeds are derived from it.",
    )
    streams = RandomStreams(int(seed), comm.rank, comm.device).seed_generators()
    _begin_shared(streams, comm, comm.allgather_obj(process_id()))
    return streams


def share_equal_numbers(comm: Communicator) -> None:
    """Treat equal generators as those of `seed_ranks`, for a framework that seeds. *Collective.*

    If the ranks' generators differ, for instance after the framework has restored a state, it only
    notes that the ranks share no numbers.
    """
    gathered = comm.allgather_obj((position(), process_id(), _current.is_shared))
    if len({position for position, _, _ in gathered}) > 1:
        _current.loaded({})
    elif not any(theirs for _, _, theirs in gathered):
        streams = RandomStreams(torch.initial_seed() % _NUM_SEEDS, comm.rank, comm.device)
        _begin_shared(streams, comm, [process for _, process, _ in gathered])


def _begin_shared(streams: RandomStreams, comm: Communicator, processes: Sequence[str]) -> None:
    # Generators belong to the process: ranks that are threads of one cannot draw apart.
    if comm.size > 1 and len(set(processes)) == comm.size:
        adopt(streams)
        comm.on_finalize(lambda: adopt(None) if _current is streams else None)
    else:
        streams.is_shared = False
