"""Iterators that draw the same order on all ranks, each of which reads its own data set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DataLoader, SequentialSampler

from torchmn.data.equal_arguments import raise_if_ranks_differ
from torchmn.data.permutations import draw_seed
from torchmn.data.serial_iterator import SerialIterator

if TYPE_CHECKING:
    from torchmn.comm import Communicator

Batches = TypeVar("Batches")


def create_synchronized_iterator(iterator: Batches, comm: Communicator) -> Batches:
    """Make ``iterator`` draw the same orders on all ranks, in place, and return it. *Collective.*

    For ranks that share a model and read different parts of the same samples, such as images on one
    and labels on another. The states stay those of the plain iterator. A `SerialIterator` is set
    back to its beginning. A DataLoader's sampler gets a random generator with the same seed on all
    ranks; random augmentation in its workers does not.

    Args:
        iterator: a `SerialIterator`, or a DataLoader whose sampler draws from a ``generator``, as
            with ``shuffle=True``, or reads in sequence.
        comm: the ranks.

    Raises, on all ranks:
        UsageError: on some rank, ``iterator`` is something else.
        RankMismatchError: ranks have different numbers of samples (see `create_empty_dataset`),
            or only some of them shuffle.

    Example:
        >>> iterator = torchmn.SerialIterator(range(4), 2, collate_fn=list)
        >>> iterator = torchmn.create_synchronized_iterator(iterator, comm)
        >>> sorted(next(iterator) + next(iterator))
        [0, 1, 2, 3]
    """
    kind, problem = _kind(iterator)
    raise_if_ranks_differ(
        comm,
        "create_synchronized_iterator",
        {"the order": kind},
        problem=problem,
        cure="Pass data sets of one length, such as create_empty_dataset(dataset), and shuffle on "
        "all ranks or on none.",
    )
    seed = comm.bcast_obj(draw_seed())
    if isinstance(iterator, SerialIterator):
        iterator.reset(seed=seed)
    elif kind.endswith("shuffled"):
        _sampler(iterator).generator = torch.Generator(device="cpu").manual_seed(seed)
    return iterator


def _kind(iterator: Any) -> tuple[str, str]:
    """Describe the order, which must be the same on all ranks; return also a problem or ""."""
    if isinstance(iterator, SerialIterator):
        return _described(len(iterator.dataset), iterator.shuffle), ""
    if isinstance(iterator, DataLoader):
        sampler = _sampler(iterator)
        if isinstance(sampler, SequentialSampler):
            return _described(len(sampler), is_shuffled=False), ""
        if hasattr(sampler, "generator"):
            return _described(len(sampler), is_shuffled=True), ""
        return "", (
            f"a DataLoader with a {type(sampler).__name__}, which has no generator. Use "
            "shuffle=True, a sampler with a generator=, or create_multi_node_iterator."
        )
    return "", (
        f"a {type(iterator).__name__}. It needs a SerialIterator or a DataLoader; for others use "
        "create_multi_node_iterator."
    )


def _described(length: int, is_shuffled: bool) -> str:
    return f"{length} samples, {'shuffled' if is_shuffled else 'in sequence'}"


def _sampler(loader: Any) -> Any:
    """The sampler of single indices: a batch sampler's own sampler, where it has one."""
    return getattr(loader.batch_sampler, "sampler", loader.batch_sampler or loader.sampler)
