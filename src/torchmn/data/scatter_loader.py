"""An ordinary DataLoader on many ranks: every rank gets its part of each batch.

Rank 0 draws the batches as one process does, from the loader's own sampler and generators, and all
ranks receive the indices, once per pass. So any sampler works, the order of samples is that of one
process, and the samples of a step do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, get_args, overload

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torchmn.base.errors import raise_if_unknown
from torchmn.data import rank_seeds
from torchmn.data.counted_loader import CountedLoader, loader_copy
from torchmn.data.dataset_comparison import raise_if_datasets_differ
from torchmn.data.divided_batches import divided_batches
from torchmn.data.equal_arguments import raise_if_ranks_differ
from torchmn.data.global_sampler import EmptyBatchCollate, GlobalSampler
from torchmn.data.scattered_batches import ScatteredBatches, is_drawn_at_once
from torchmn.data.scattered_stream import (
    EACH_RANK,
    RANK_0,
    ReadBy,
    ScatteredStream,
    StreamLoader,
)
from torchmn.data.stream_parts import share_held
from torchmn.data.sub_dataset import SubDataset, length_of

if TYPE_CHECKING:
    from torchmn.comm import Communicator

Loader = TypeVar("Loader", bound=DataLoader[Any])
Second = TypeVar("Second", bound=DataLoader[Any])
Third = TypeVar("Third", bound=DataLoader[Any])
Batch = TypeVar("Batch")


@overload
def scatter_loader(
    loader: Loader, comm: Communicator, *, read_by: ReadBy | None = None
) -> Loader: ...


@overload
def scatter_loader(  # type: ignore[overload-overlap]
    loader: tuple[Loader, Second], comm: Communicator, *, read_by: ReadBy | None = None
) -> tuple[Loader, Second]: ...


@overload
def scatter_loader(  # type: ignore[overload-overlap]
    loader: tuple[Loader, Second, Third], comm: Communicator, *, read_by: ReadBy | None = None
) -> tuple[Loader, Second, Third]: ...


@overload
def scatter_loader(  # type: ignore[overload-overlap]
    loader: Sequence[Loader], comm: Communicator, *, read_by: ReadBy | None = None
) -> tuple[Loader, ...]: ...


@overload
def scatter_loader(
    loader: Iterable[Batch], comm: Communicator, *, read_by: ReadBy
) -> StreamLoader[Batch]: ...


def scatter_loader(loader: Any, comm: Communicator, *, read_by: ReadBy | None = None) -> Any:
    """A copy of a DataLoader that gives every rank its part of each batch. *Collective.*

    ``batch_size`` stays the size of the batch over all ranks, so a script trains on N ranks as it
    does in one process. Each batch is divided among the ranks in order and as evenly as possible.
    All other options, a sampler, batch sampler or subclass of your own included, are kept. Rank 0
    draws the order of each pass, from its own random numbers, and the others receive it (they draw
    too, for what the sampler and its generators keep): after `torchmn.seed_ranks` it is that of one
    process with the same ``torch.manual_seed``. A pass begins on all ranks together (*collective*);
    each ``for`` is a new pass, as with any DataLoader.

    Parts may differ by one sample, so an optimizer that `create_multi_node_optimizer` makes for
    ``comm`` weights the ranks in each step by their parts of that step's batches, unless
    ``weight=`` is given: means are exact.

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
    the position is then exact even where workers prefetch.

    A stream (an `IterableDataset`, ``batch_size=None``, or another iterable of batches) has no
    indices, and ``read_by`` must say who reads it. Ranks communicate for every batch (*collective*)
    and end the pass together; a rank whose share has ended gets batches of 0 rows. Here the loader
    itself has ``state_dict()`` and ``load_state_dict()``: see `StreamLoader`.

    Args:
        loader: on every rank, a DataLoader of the same data set with the same options; or several
            in a tuple or list, for which a tuple of the same length is returned. It is not changed.
        comm: the ranks that share each batch.
        read_by: who reads a stream. ``rank_0``: it has all samples, rank 0 reads it, divides each
            batch and sends the parts. ``each_rank``: it yields the share of the rank, of which each
            takes its part of ``batch_size`` (with ``batch_size=None``, its batches as they are).

    Raises:
        UsageError: ``loader`` is no DataLoader and no stream, already gives each rank its part, is
            a stream without ``read_by``, or is not a stream and has it; on all ranks.
        RankMismatchError: ranks passed loaders of different lengths, or of data sets whose samples
            or order differ, as far as that can be detected; on all ranks.
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
    if read_by is not None:
        raise_if_unknown("read_by", read_by, get_args(ReadBy))
    problems = [_problem(each, comm, read_by) for each in loaders]
    if read_by is not None and not any(map(_is_stream, loaders)):
        problems.append(
            f"read_by={read_by!r} for loaders that are not streams: their data sets have indices, "
            "and each rank reads the samples of its part. Leave it out."
        )
    facts: dict[str, object] = {"the number of loaders": len(loaders), "read_by": read_by}
    for number, each in enumerate(loaders if not any(problems) else ()):
        facts |= {f"{name} of loader {number}": value for name, value in _facts(each).items()}
    raise_if_ranks_differ(
        comm,
        "scatter_loader",
        facts,
        problem=next(filter(None, problems), ""),
        cure="Pass DataLoaders of the same data sets with the same options on every rank.",
    )
    datasets = [(each.dataset, each.num_workers == 0) for each in loaders if not _is_stream(each)]
    if datasets:
        raise_if_datasets_differ("scatter_loader", datasets, comm)
    divided_batches(comm).note()
    scattered = tuple(_scattered(each, comm, read_by) for each in loaders)
    return scattered[0] if is_one else scattered


def _is_stream(loader: Any) -> bool:
    """Whether the samples of a loader have no indices that could be divided."""
    if isinstance(loader, DataLoader):
        return isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None
    return isinstance(loader, Iterable) and not isinstance(loader, Sequence)


def _scattered(loader: Any, comm: Communicator, read_by: ReadBy | None) -> Any:
    """Copy a loader, so that it returns this rank's parts. *Collective* for a stream."""
    if read_by is not None and _is_stream(loader):
        stream = ScatteredStream(loader, comm, read_by)
        if isinstance(loader, DataLoader):
            return loader_copy(loader, StreamLoader, _stream=stream, _iterator=None)
        return StreamLoader(stream)
    batches: Any = loader.batch_sampler
    generator = rank_seeds.rank_generator(loader.generator, comm.rank)
    if not isinstance(batches, GlobalSampler):
        batches = ScatteredBatches(batches, comm, loader.dataset, (generator, loader.generator))
    own: dict[str, Any] = {
        "batch_sampler": batches,
        "generator": generator,
        "_iterator": None,  # persistent workers of the original have its batches
    }
    if hasattr(loader, "load_state_dict") and isinstance(batches, ScatteredBatches):
        # The state of a loader like torchdata's StatefulDataLoader, after `break` as well. Its own
        # counts the batches of an order that only rank 0 draws.
        own |= {"state_dict": batches.last_state, "load_state_dict": batches.load_state_dict}
    if comm.size > 1 and not isinstance(loader.collate_fn, EmptyBatchCollate):
        own["collate_fn"] = EmptyBatchCollate(loader.dataset, loader.collate_fn)
    return loader_copy(loader, CountedLoader, **own)


def _facts(loader: Any) -> dict[str, int | None]:
    """Numbers that must be the same on all ranks, by name."""
    if _is_stream(loader):
        return {"the size of batches": getattr(loader, "batch_size", None)}
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
    if isinstance(loader, StreamLoader):
        return "scatter_loader"
    batches, data = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    for sampler in (getattr(batches, "sampler", None), batches):
        if isinstance(sampler, (DistributedSampler, GlobalSampler, ScatteredBatches)):
            return type(sampler).__name__
    return _SCATTER_DATASET if isinstance(data, SubDataset) and data.is_of_one_rank else ""


def _problem(loader: Any, comm: Communicator, read_by: ReadBy | None) -> str:
    if isinstance(loader, StreamLoader):
        return "a loader that scatter_loader has returned. Pass the loader of one process."
    if _is_stream(loader):
        return _problem_of_stream(loader, comm, read_by)
    if not isinstance(loader, DataLoader):
        return (
            f"a {type(loader).__name__}. It needs a torch.utils.data.DataLoader, or a tuple or "
            "list of them."
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


def _problem_of_stream(loader: Any, comm: Communicator, read_by: ReadBy | None) -> str:
    data = getattr(loader, "dataset", loader)
    what = f"a {type(loader).__name__}" + ("" if data is loader else f" of a {type(data).__name__}")
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:
        what += " with batch_size=None"
    held, rank = share_held(data, comm)
    size = getattr(loader, "batch_size", None)
    if held and rank != comm.rank and read_by != RANK_0:
        return (
            f"{what}, which holds {held} on rank {comm.rank}: the share of rank {rank} would be "
            f"read twice and this rank's never. Create it with rank {comm.rank}. (litdata takes it "
            "from the variable GLOBAL_RANK.)"
        )
    if read_by is None:
        advice = (
            f"It holds {held}, so it seems to yield this rank's share: pass read_by='each_rank'."
            if held
            else "Pass read_by='rank_0' if it yields all samples: rank 0 reads it as one process "
            "does and sends each rank its part of each batch. Pass read_by='each_rank' if it "
            "yields only this rank's share, as after split_dataset_by_node or webdataset's "
            "split_by_node: then no samples are sent."
        )
        return f"{what}, a stream, which has no batches of indices to divide. {advice}"
    if read_by == RANK_0 and held:
        return (
            f"read_by='rank_0' for {what}, which holds {held}. It seems to yield the share of one "
            "rank, and the other shares would never be read. Pass read_by='each_rank', or the data "
            "set of one process."
        )
    if read_by == EACH_RANK and size is not None and size < comm.size:
        return (
            f"batch_size={size} for {comm.size} ranks that each read a share. It is the size over "
            "all ranks, and each needs at least one sample of it."
        )
    return ""
