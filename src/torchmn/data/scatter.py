"""Divide a data set among the ranks: fixed shards, by ChainerMN's two rules."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet

import numpy as np

from torchmn.base.errors import RankMismatchError, UsageError
from torchmn.cluster.units import MiB
from torchmn.data import rank_seeds
from torchmn.data.dataset_comparison import raise_if_datasets_differ
from torchmn.data.permutations import SEED_RULE, draw_seed, is_seed, permutation
from torchmn.data.received_samples import receive_samples
from torchmn.data.sub_dataset import SizedDataset, SubDataset

if TYPE_CHECKING:
    from torchmn.comm import Communicator

Sample = TypeVar("Sample")
_scattered: WeakSet[Communicator] = WeakSet()
"""The communicators whose ranks have shards of data sets."""
SHARDS_DIFFER = (
    "On another number of ranks, shards hold different samples: a loop that trains on one sees "
    "some samples of the current epoch twice and some not at all. With GlobalSampler none are lost "
    "or repeated."
)
"""The warning for a training with fixed shards that resumes on another number of ranks."""


def warnings_of_shards(comm: Communicator) -> list[str]:
    """Warnings about the shards of a communicator, for another number of ranks. Local."""
    return [SHARDS_DIFFER] if comm in _scattered else []


def shard_bounds(
    num_samples: int, size: int, rank: int, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """The half-open range ``(begin, end)`` of the samples of rank ``rank`` of ``size``. Local.

    With ``force_equal_length`` all shards have ``ceil(num_samples / size)`` samples and begin at
    ``floor(num_samples * rank / size)``: neighbours share at most one sample, together they have
    all, and with fewer samples than ranks some are in several shards so that every rank has one.
    Without it, the first ``num_samples % size`` ranks get one sample more than the others: every
    sample is in exactly one shard, and shards may be empty.

    >>> [shard_bounds(5, 3, rank) for rank in range(3)]
    [(0, 2), (1, 3), (3, 5)]
    >>> [shard_bounds(5, 3, rank, force_equal_length=False) for rank in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    """
    if force_equal_length:
        begin = num_samples * rank // size
        return begin, begin + -(-num_samples // size)
    share, rest = divmod(num_samples, size)
    begin = share * rank + min(rank, rest)
    return begin, begin + share + (1 if rank < rest else 0)


def scatter_index(
    n_total_samples: int,
    comm: Communicator,
    root: int = 0,
    *,
    force_equal_length: bool = True,
) -> tuple[int, int]:
    """This rank's half-open range ``(begin, end)`` of the root's ``n_total_samples``. *Collective*.

    The root's ``n_total_samples`` and ``force_equal_length`` are used. See `shard_bounds`.

    Raises:
        UsageError: the number of samples is negative, on all ranks.
        RankMismatchError: ranks passed different roots, on all ranks.

    Example:
        >>> torchmn.scatter_index(10, comm)
        (0, 10)
    """
    try:
        length, problem = operator.index(n_total_samples), None
        if length < 0:
            problem = f"n_total_samples={length} must be 0 or more."
    except TypeError:
        length, problem = 0, f"n_total_samples={n_total_samples!r} must be an integer."
    arguments = {
        "length": length,
        "problem": problem,
        "force_equal_length": bool(force_equal_length),
    }
    chosen = _gather(comm, arguments, root)[root]
    return shard_bounds(
        chosen["length"],
        comm.size,
        comm.rank,
        force_equal_length=chosen["force_equal_length"],
    )


def scatter_dataset(
    dataset: SizedDataset[Sample] | None,
    comm: Communicator,
    root: int = 0,
    shuffle: bool = False,
    seed: int | None = None,
    max_buf_len: int = 256 * MiB,
    *,
    force_equal_length: bool = True,
) -> SubDataset[Sample]:
    """This rank's shard of the root's data set. *Collective*.

    What is sent depends on which ranks have the data set:

    - Every rank passes one, all of the same samples in the same order: only the seed is sent, and
      every rank reads its samples from its own.
    - Only the root has it and the others pass None: the root reads the samples of all shards, and
      each rank receives and keeps those of its own. They (tensors, arrays, numbers, texts, tuples,
      lists, dicts) are received as they were read, so apply random augmentation to the shard and
      not before. Other objects are pickled over MPI or with the job's secret, and rejected
      otherwise.

    The root's ``shuffle``, ``seed``, ``max_buf_len`` and ``force_equal_length`` are used. Shards
    stay the same for the whole run; for a new division in every epoch see `GlobalSampler`.

    Args:
        dataset: a length and samples by index, or None on ranks other than the root.
        comm: the ranks that share the data set.
        root: the rank whose data set it is.
        shuffle: order the samples by one permutation (ChainerMN's for the same seed).
        seed: 0 .. 2**32 - 1, or None for a different permutation every time.
        max_buf_len: bytes between two synchronizations of all ranks while samples are sent.
        force_equal_length: the rule of `shard_bounds`. Without it, shards may differ in length by
            one, and a loop over them needs `optimizer.join()`.

    Raises:
        UsageError: an argument is out of range, or the root's data set has no length.
        RankMismatchError: ranks passed different roots, or data sets whose lengths differ or, as
            far as that can be detected, samples or their order.
        DataError: the data set raised an exception.
        UnsupportedError: a sample cannot be sent.
        All ranks raise the same error.

    Example:
        >>> dataset = "abcd" if comm.rank == 0 else None
        >>> shard = torchmn.scatter_dataset(dataset, comm, shuffle=True, seed=0)
        >>> len(shard), sorted(shard)
        (4, ['a', 'b', 'c', 'd'])
    """
    arguments = _arguments(dataset, seed, max_buf_len)
    arguments["shuffle"] = bool(shuffle)
    arguments["force_equal_length"] = bool(force_equal_length)
    arguments["random"] = rank_seeds.shared_state() if comm.rank == root else None
    gathered = _gather(comm, arguments, root)
    chosen = gathered[root]
    rank_seeds.follow(chosen["random"])  # the root may have made the data set at random
    lengths = [theirs["length"] for theirs in gathered]
    if lengths[root] is None:
        raise UsageError(
            f"scatter_dataset: rank {root} is the root and passed None. The root must pass the "
            "data set."
        )
    _raise_if_lengths_differ(lengths, root)
    raise_if_datasets_differ("scatter_dataset", [(dataset, False)], comm, root)
    length = lengths[root]
    order = permutation(length, chosen["seed"]) if chosen["shuffle"] else np.arange(length)
    bounds = [
        shard_bounds(length, comm.size, rank, force_equal_length=chosen["force_equal_length"])
        for rank in range(comm.size)
    ]
    samples = cast("SizedDataset[Any]", dataset)
    if None in lengths:
        samples = receive_samples(
            dataset,
            comm,
            root,
            [np.sort(order[begin:end]) for begin, end in bounds],
            length=length,
            max_buf_len=chosen["max_buf_len"],
        )
    _scattered.add(comm)  # a resume on another number of ranks warns that its shards differ
    begin, end = bounds[comm.rank]
    shard = SubDataset(samples, begin, end, order if chosen["shuffle"] else None)
    shard.is_of_one_rank = comm.size > 1
    return shard


def _arguments(
    dataset: SizedDataset[Any] | None, seed: int | None, max_buf_len: int
) -> dict[str, Any]:
    """The arguments of this rank, with the problem if one is invalid. Never raises."""
    length, problem = None, None
    if dataset is not None:
        try:
            length = len(dataset)
        except Exception as error:
            problem = (
                f"the data set, a {type(dataset).__name__}, has no length "
                f"({type(error).__name__}: {error}). A data set to scatter needs len() and samples "
                "by index."
            )
    if seed is not None and not is_seed(seed):
        problem = f"{SEED_RULE} It is {seed!r}."
    if not isinstance(max_buf_len, int) or max_buf_len < 1:
        problem = f"max_buf_len={max_buf_len!r} must be a number of bytes, at least 1."
    return {
        "length": length,
        "problem": problem,
        "seed": int(seed) if seed is not None and is_seed(seed) else draw_seed(),
        "max_buf_len": max_buf_len if isinstance(max_buf_len, int) else 0,
    }


def _gather(comm: Communicator, arguments: dict[str, Any], root: int) -> list[dict[str, Any]]:
    """Gather all ranks' arguments. *Collective*. Raises the same error on all ranks."""
    gathered: list[dict[str, Any]] = comm.allgather_obj({**arguments, "root": operator.index(root)})
    roots = [theirs["root"] for theirs in gathered]
    if len(set(roots)) > 1:
        raise RankMismatchError(
            f"Ranks 0 to {comm.size - 1} passed root={roots}. All ranks must pass the same root."
        )
    if not 0 <= roots[0] < comm.size:
        raise UsageError(f"root={roots[0]} must be a rank from 0 to {comm.size - 1}.")
    for rank, theirs in enumerate(gathered):
        if theirs["problem"] is not None:
            raise UsageError(f"Rank {rank}: {theirs['problem']}")
    return gathered


def _raise_if_lengths_differ(lengths: list[int | None], root: int) -> None:
    for rank, length in enumerate(lengths):
        if length is not None and length != lengths[root]:
            raise RankMismatchError(
                f"scatter_dataset: rank {root} has a data set of {lengths[root]} samples and rank "
                f"{rank} one of {length}. Pass the same data set on every rank, or None on every "
                "rank but the root."
            )


def create_empty_dataset(dataset: SizedDataset[Any]) -> list[tuple[()]]:
    """A data set as long as ``dataset`` whose samples are ``()``. Local.

    For ranks of a model-parallel group that take no input: their iterators make the same number of
    iterations as those of the other ranks.

    >>> create_empty_dataset(["a", "b"])
    [(), ()]
    """
    return [()] * len(dataset)
