"""Divide a data set among the ranks: fixed shards, by ChainerMN's two rules."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torchmn.data.node_shared_dataset import copy_to_nodes
from torchmn.data.permutations import SEED_RULE, draw_seed, is_seed, permutation
from torchmn.data.sub_dataset import SizedDataset, SubDataset
from torchmn.errors import RankMismatchError, UsageError
from torchmn.transports.shared_segment import SHARED_DIRECTORY
from torchmn.units import MiB

if TYPE_CHECKING:
    from torchmn.communicators import Communicator

Sample = TypeVar("Sample")


def shard_bounds(
    num_samples: int, size: int, rank: int, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """Which samples ``begin`` .. ``end - 1`` rank ``rank`` of ``size`` gets. Local.

    With ``force_equal_length`` all shards have ``ceil(num_samples / size)`` samples and begin at
    ``floor(num_samples * rank / size)``: neighbours share at most one sample, together they hold
    all, and with fewer samples than ranks some are held twice so that every rank has one. Without
    it the first ``num_samples % size`` ranks get one sample more than the others: every sample is
    in exactly one shard, and shards may be empty.

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

    The root's ``n_total_samples`` and ``force_equal_length`` count. See `shard_bounds`.

    Raises:
        UsageError: the number of samples is negative, on all ranks.
        RankMismatchError: ranks passed different roots, on all ranks.
    """
    try:
        length, refusal = operator.index(n_total_samples), None
        if length < 0:
            refusal = f"n_total_samples is {length}. It must be 0 or more."
    except TypeError:
        length, refusal = 0, f"n_total_samples is {n_total_samples!r}. It must be an integer."
    words = {
        "length": length,
        "refusal": refusal,
        "force_equal_length": bool(force_equal_length),
    }
    chosen = _agree(comm, words, root)[root]
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
    shared_directory: str = SHARED_DIRECTORY,
) -> SubDataset[Sample]:
    """This rank's shard of the root's data set. *Collective*.

    What travels depends on who has the data set:

    - Every rank passes one, all of the same length: only the seed travels and every rank reads its
      samples from its own. They must be the same data set, which is not checked.
    - Only the root has it and the others pass None: the root reads every sample once, and each
      *node* gets one copy in memory that its ranks share. Samples arrive as they were (tensors,
      arrays, numbers, texts, tuples, lists, dicts) and are fixed then, so apply random
      augmentation to the shard and not before. An object that is none of these is pickled over
      MPI or with the job's secret, else refused.

    The root's ``shuffle``, ``seed``, ``max_buf_len`` and ``force_equal_length`` count. Shards stay
    the same for the whole run; for a new division every epoch see `GlobalSampler`.

    Args:
        dataset: a length and samples by index, or None on ranks other than the root.
        comm: the ranks that share the data set.
        root: the rank whose data set it is.
        shuffle: take the samples in the order of one permutation (ChainerMN's for the same seed).
        seed: 0 .. 2**32 - 1, or None for another permutation every time.
        max_buf_len: bytes between two meetings of all ranks while the copy travels.
        force_equal_length: which rule of `shard_bounds`. Without it shards may differ in length by
            one, and a loop over them needs `optimizer.join()`.
        shared_directory: the folder in memory (or on a local disk) for the node's copy.

    Raises:
        UsageError: an argument is out of range, or the root's data set has no length.
        RankMismatchError: ranks passed different roots, or data sets of different lengths.
        DataError: the data set raised.
        SharedMemoryError: a node's memory is too small.
        UnsupportedError: a sample cannot travel.
        All ranks raise the same sentence.
    """
    words = _words(dataset, seed, max_buf_len)
    words["shuffle"] = bool(shuffle)
    words["force_equal_length"] = bool(force_equal_length)
    everyone = _agree(comm, words, root)
    chosen = everyone[root]
    lengths = [words["length"] for words in everyone]
    if lengths[root] is None:
        raise UsageError(
            f"scatter_dataset: rank {root} is the root and passed None. The root must pass the "
            "data set."
        )
    _raise_if_lengths_differ(lengths, root)
    samples = (
        copy_to_nodes(
            dataset,
            comm,
            root,
            max_buf_len=chosen["max_buf_len"],
            shared_directory=shared_directory,
        )
        if None in lengths
        else cast("SizedDataset[Any]", dataset)
    )
    order = permutation(lengths[root], chosen["seed"]) if chosen["shuffle"] else None
    begin, end = shard_bounds(
        lengths[root], comm.size, comm.rank, force_equal_length=chosen["force_equal_length"]
    )
    return SubDataset(samples, begin, end, order)


def _words(dataset: SizedDataset[Any] | None, seed: int | None, max_buf_len: int) -> dict[str, Any]:
    """What this rank tells the others first. Never raises: what is wrong is told as well."""
    length, refusal = None, None
    if dataset is not None:
        try:
            length = len(dataset)
        except Exception as error:
            refusal = (
                f"the data set, a {type(dataset).__name__}, has no length "
                f"({type(error).__name__}: {error}). A data set to scatter needs len() and samples "
                "by index."
            )
    if seed is not None and not is_seed(seed):
        refusal = f"{SEED_RULE} It is {seed!r}."
    if not isinstance(max_buf_len, int) or max_buf_len < 1:
        refusal = f"max_buf_len is {max_buf_len!r}. It is a number of bytes and must be at least 1."
    return {
        "length": length,
        "refusal": refusal,
        "seed": int(seed) if seed is not None and is_seed(seed) else draw_seed(),
        "max_buf_len": max_buf_len if isinstance(max_buf_len, int) else 0,
    }


def _agree(comm: Communicator, words: dict[str, Any], root: int) -> list[dict[str, Any]]:
    """All ranks' words. *Collective*. Raises on all ranks alike if they cannot go together."""
    everyone: list[dict[str, Any]] = comm.allgather_obj({**words, "root": operator.index(root)})
    roots = [theirs["root"] for theirs in everyone]
    if len(set(roots)) > 1:
        raise RankMismatchError(
            f"Ranks 0 to {comm.size - 1} passed root={roots}. All ranks must pass the same root."
        )
    if not 0 <= roots[0] < comm.size:
        raise UsageError(f"root is {roots[0]}. It must be a rank from 0 to {comm.size - 1}.")
    for rank, theirs in enumerate(everyone):
        if theirs["refusal"] is not None:
            raise UsageError(f"Rank {rank}: {theirs['refusal']}")
    return everyone


def _raise_if_lengths_differ(lengths: list[int | None], root: int) -> None:
    for rank, length in enumerate(lengths):
        if length is not None and length != lengths[root]:
            raise RankMismatchError(
                f"scatter_dataset: rank {root} has a data set of {lengths[root]} samples and rank "
                f"{rank} one of {length}. Pass the same data set on every rank, or None on every "
                "rank but the root."
            )
