"""An ordinary DataLoader on many ranks: every rank gets its part of each batch.

Rank 0 draws the batches as one process does, from the loader's own sampler and generators, and all
ranks receive the indices, once per pass. So any sampler works, the order of samples is that of one
process, and the samples of a step do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torchmn.data import rank_seeds
from torchmn.data.counted_loader import CountedLoader, counted_copy
from torchmn.data.dataset_comparison import raise_if_datasets_differ
from torchmn.data.divided_batches import divided_batches
from torchmn.data.equal_arguments import raise_if_ranks_differ
from torchmn.data.global_sampler import EmptyBatchCollate, GlobalSampler
from torchmn.data.scattered_batches import ScatteredBatches, is_drawn_at_once
from torchmn.data.sub_dataset import SubDataset, length_of

if TYPE_CHECKING:
    from torchmn.comm import Communicator

Sample = TypeVar("Sample")


@overload
def scatter_loader(loader: DataLoader[Sample], comm: Communicator) -> DataLoader[Sample]: ...


@overload
def scatter_loader(
    loader: Sequence[DataLoader[Any]], comm: Communicator
) -> tuple[DataLoader[Any], ...]: ...


def scatter_loader(
    loader: DataLoader[Any] | Sequence[DataLoader[Any]], comm: Communicator
) -> DataLoader[Any] | tuple[DataLoader[Any], ...]:
    """A copy of a DataLoader that gives every rank its part of each batch. *Collective.*

    ``batch_size`` stays the size of the batch over all ranks, so a script trains on N ranks as it
    does in one process. Each batch is divided among the ranks in order and as evenly as possible.
    All other options, a sampler, batch sampler or subclass of your own included, are kept. Rank 0
    draws the order of each pass, from its own random numbers, and the others receive it: after
    `torchmn.seed_ranks` it is that of one process with the same ``torch.manual_seed``. A pass
    begins on all ranks together (*collective*); each ``for`` is a new pass, as with any DataLoader.

    Parts may differ by one sample, so an optimizer that `create_multi_node_optimizer` makes for
    ``comm`` weights the ranks in each step by their parts of the batches that the step is of,
    unless ``weight=`` is given: means are exact.

    Where a batch has fewer samples than there are ranks, the last ranks get a batch of 0 rows, so
    that all make the same number of steps. Under ``torch.no_grad()`` or ``inference_mode()``, in an
    evaluation, they get none: sum over ranks after the loop (`Communicator.sum_over_ranks`), not
    in it.

    ``loader.batch_sampler`` has ``state_dict()`` and ``load_state_dict()``: in the middle of a pass
    the state continues it, on any number of ranks, otherwise a new pass begins. It remembers the
    random numbers of the pass, not its order; a sampler that does not draw the same order from them
    again is refused. A loader that has these methods itself, as torchdata's StatefulDataLoader, has
    this state, which counts batches over all ranks, also after ``break``.

    A DataLoader whose ``batch_sampler`` is a `GlobalSampler` of ``comm`` keeps it, with its state:
    the position is then exact also where workers prefetch.

    Args:
        loader: on every rank, a DataLoader of the same data set with the same options; or several
            in a tuple or list, for which a tuple of the same length is returned. It is not changed.
        comm: the ranks that share each batch.

    Raises:
        UsageError: it is no DataLoader with batches of a data set with indices, or it gives each
            rank its part already; on all ranks.
        RankMismatchError: ranks passed loaders of different lengths, or of data sets whose samples
            or their order differ, as far as that shows; on all ranks.
        When a pass begins: DataError, the sampler of rank 0 raised (rank 0 raises its error);
        UsageError, a state that was loaded belongs to another order.

    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.arange(5))
    >>> loader = scatter_loader(torch.utils.data.DataLoader(data, batch_size=2), comm)
    >>> len(loader), [x.tolist() for x, in loader]  # on one rank: all of each batch
    (3, [[0, 1], [2, 3], [4]])
    """
    is_one = isinstance(loader, DataLoader) or not isinstance(loader, Sequence)
    loaders: list[Any] = [loader] if is_one else list(loader)
    problems = [_problem(each, comm) for each in loaders]
    facts: dict[str, int | None] = {"the number of loaders": len(loaders)}
    for number, each in enumerate(loaders if not any(problems) else ()):
        facts |= {f"{name} of loader {number}": value for name, value in _facts(each).items()}
    raise_if_ranks_differ(
        comm,
        "scatter_loader",
        facts,
        problem=next(filter(None, problems), ""),
        cure="Pass DataLoaders of the same data sets with the same options on every rank.",
    )
    datasets = [(each.dataset, each.num_workers == 0) for each in loaders]
    raise_if_datasets_differ("scatter_loader", datasets, comm)
    divided_batches(comm).note()
    scattered = tuple(_scattered(each, comm) for each in loaders)
    return scattered[0] if is_one else scattered


def _scattered(loader: DataLoader[Any], comm: Communicator) -> DataLoader[Any]:
    """Copy a loader, so that it returns this rank's parts. Local."""
    batches: Any = loader.batch_sampler
    if not isinstance(batches, GlobalSampler):
        batches = ScatteredBatches(batches, comm, loader.dataset)
    own: dict[str, Any] = {
        "batch_sampler": batches,
        "_iterator": None,  # persistent workers of the original have its batches
    }
    if hasattr(loader, "load_state_dict") and isinstance(batches, ScatteredBatches):
        # The state of a loader like torchdata's StatefulDataLoader, after `break` as well. Its own
        # counts the batches of an order that only rank 0 draws.
        own |= {"state_dict": batches.last_state, "load_state_dict": batches.load_state_dict}
    if comm.size > 1 and not isinstance(loader.collate_fn, EmptyBatchCollate):
        own["collate_fn"] = EmptyBatchCollate(loader.dataset, loader.collate_fn)  # type: ignore[arg-type]
    if comm.rank > 0 and loader.generator is not None:
        # It seeds the workers, whose augmentation would be the same on all ranks.
        seed = rank_seeds.rank_seed(loader.generator.initial_seed(), comm.rank)
        own["generator"] = torch.Generator(device="cpu").manual_seed(seed)
    return counted_copy(loader, **own)


def _facts(loader: Any) -> dict[str, int | None]:
    """Numbers that must be the same on all ranks, by name."""
    read_ahead = loader.num_workers * (loader.prefetch_factor or 0)
    return {
        "the number of samples": length_of(loader.dataset),
        "the number of batches": length_of(loader.batch_sampler),
        # What is not drawn at once is drawn while the loop runs, on all ranks at the same steps.
        "what its workers read ahead": (
            0 if is_drawn_at_once(loader.batch_sampler) else read_ahead
        ),
    }


_SCATTER_DATASET = "scatter_dataset"


def divided_by(loader: Any) -> str:
    """Name what already gives each rank its part of a DataLoader's data; "" if none. Local."""
    batches, data = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    for sampler in (getattr(batches, "sampler", None), batches):
        if isinstance(sampler, (DistributedSampler, GlobalSampler, ScatteredBatches)):
            return type(sampler).__name__
    return _SCATTER_DATASET if isinstance(data, SubDataset) and data.is_of_one_rank else ""


def _problem(loader: Any, comm: Communicator) -> str:
    if not isinstance(loader, DataLoader):
        return (
            f"a {type(loader).__name__}. It needs a torch.utils.data.DataLoader, or a tuple or "
            "list of them. A loader that reads a stream (webdataset's WebLoader) divides it "
            "itself: let each rank read its part, in batches of batch_size // comm.size samples."
        )
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"a DataLoader of a {type(loader.dataset).__name__}, a stream, whose samples have no "
            "indices to divide. Let the data set yield the samples of this rank (comm.rank of "
            "comm.size) with batch_size // comm.size samples in a batch, or use a source of "
            "torchmn.cntk.readers, which divides streams."
        )
    if loader.batch_sampler is None:
        return (
            "a DataLoader with batch_size=None, which has no batches to divide. Give it a "
            "batch_size, or a batch_sampler= that yields lists of indices."
        )
    batches = loader.batch_sampler
    if isinstance(batches, GlobalSampler) and not isinstance(loader, CountedLoader):
        return batches.misfit(comm)
    if isinstance(getattr(batches, "sampler", None), GlobalSampler):
        return (
            "a DataLoader with a GlobalSampler as sampler=, which expects single indices, and it "
            "yields whole batches. Write DataLoader(dataset, batch_sampler=sampler), without "
            "batch_size."
        )
    by = divided_by(loader)
    if by and by != _SCATTER_DATASET:
        return (
            f"a DataLoader whose {by} gives each rank its part already. Pass the DataLoader of "
            "one process: batch_size= of all ranks together, and shuffle=True or a plain sampler."
        )
    if by:
        return (
            "a DataLoader of a shard of scatter_dataset, which differs between ranks. Pass the "
            "DataLoader of the whole data set; scatter_dataset is not needed."
        )
    return ""
