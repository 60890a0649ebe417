"""An ordinary DataLoader on many ranks: every rank gets its part of each batch.

Rank 0 draws the batches as one process does, from the loader's own sampler and generators, and all
ranks receive the indices, once per pass. So any sampler works, the order of samples is that of one
process, and the samples of a step do not depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torchmn.base.errors import DataError, UsageError
from torchmn.comm.collectives import bcast_for
from torchmn.data import rank_seeds, rng_state
from torchmn.data.counted_loader import CountedLoader, PassSampler, counted_copy
from torchmn.data.dataset_comparison import contents, raise_if_datasets_differ, warn_if_changed
from torchmn.data.divided_batches import LoaderPass, divided_batches
from torchmn.data.equal_arguments import raise_if_ranks_differ
from torchmn.data.global_sampler import EmptyBatchCollate, GlobalSampler
from torchmn.data.sampler_randomness import GeneratorMarks, capture, has_drawn_since, replayed
from torchmn.data.scatter import shard_bounds
from torchmn.data.sub_dataset import SubDataset

if TYPE_CHECKING:
    from torchmn.comm import Communicator

Sample = TypeVar("Sample")


class LoaderState(TypedDict, total=False):
    """``batches``: batches over all ranks that the loop has received; the rest is how to redraw.

    ``begun`` is there if the sampler drew when its iterator was made, before a DataLoader draws.
    """

    batches: int
    digest: str
    begun: dict[str, Any]
    randomness: dict[str, Any]


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
    facts = {"the number of loaders": len(loaders)}
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
    """The copy, with this rank's parts."""
    batches: Any = loader.batch_sampler
    if not isinstance(batches, GlobalSampler):
        batches = ScatteredBatches(batches, comm, loader.dataset)
    own: dict[str, Any] = {
        "batch_sampler": batches,
        "_iterator": None,  # of persistent workers
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


@dataclass
class _Order:
    """The order of one pass, as rank 0 draws it."""

    resumed: LoaderState | None
    before: torch.Tensor | None
    """torch's generator when a resumed pass began, before the loader drew a seed of workers."""
    state: LoaderState = field(default_factory=LoaderState)
    """What is known once the order is drawn; empty before."""
    num_batches: int | None = None
    """Of the whole pass, once it is known."""
    drawing: Iterator[Sequence[Any]] | None = None
    """The sampler's iterator, on rank 0."""
    begun: dict[str, Any] | None = None
    """What was drawn from when the sampler's iterator was made, if anything was."""
    error: Exception | None = None
    """What making it has raised."""
    marks: GeneratorMarks | None = None
    """Of the sampler's generators, on rank 0."""
    indices: list[Any] = field(default_factory=list)
    """In an evaluation, the samples of each part that the loader has drawn."""
    num_drawn: int = 0
    """Batches over all ranks whose parts the loader has drawn, those that it skipped included."""

    def begin(self, batches: Iterable[Sequence[Any]]) -> None:
        """Make the sampler's iterator when one process does: some draw the whole order then."""
        before = capture(batches)
        try:
            self.drawing = iter(batches)
        except Exception as error:
            self.error = error
        if has_drawn_since(before, batches):
            self.begun = before

    @property
    def first(self) -> int:
        """The batch with which it begins."""
        return 0 if self.resumed is None else self.resumed["batches"]


class ScatteredBatches(PassSampler):
    """This rank's parts of the batches that rank 0 draws; made by `scatter_loader`.

    What the batch sampler of the original loader has, such as ``set_epoch``, is found here too, and
    matters on rank 0. A script may set what it has, such as ``batch_size``, between two passes.

    Args:
        batches: the original batch sampler.
        comm: the ranks.
        dataset: if given, ranks are warned if a later pass that trains finds that it has changed in
            different ways.

    >>> loader = torchmn.scatter_loader(torch.utils.data.DataLoader(range(4), batch_size=2), comm)
    >>> [*loader.batch_sampler]  # on one rank: all of each batch
    [[0, 1], [2, 3]]
    >>> loader.batch_sampler.state_dict()  # the beginning of a pass
    {'batches': 0}
    """

    def __new__(cls, *args: object, **options: object) -> ScatteredBatches:
        """Raises UsageError: Lightning makes it again, with a sampler that divides once more."""
        if "drop_last" in options:
            raise UsageError(
                "scatter_loader gives each rank its part of the data already, and the framework "
                "would divide that part among the ranks once more. Give Lightning's Trainer or "
                "Fabric's setup_dataloaders() use_distributed_sampler=False, or the DataLoader of "
                "one process, which they divide; trainer.predict() needs the latter."
            )
        return super().__new__(cls)

    def __init__(
        self, batches: Iterable[Sequence[Any]], comm: Communicator, dataset: Any = None
    ) -> None:
        self.batches = batches
        self._dataset = dataset
        super().__init__(comm, "scatter_loader")
        self._order: _Order | None = None
        """Of the last pass; None before there is one, or since a state was loaded."""
        self._resumed: LoaderState | None = None
        """What was loaded and no pass has continued yet."""

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "batches":  # as in copying, before it has any
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "batches" or name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self.batches, name, value)

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self._comm

    def received_indices(self) -> list[Any]:
        """The indices of each batch that the last loop of an evaluation has received. Local."""
        if self._order is None or self._pass is None:
            return []
        return self._order.indices[: self._pass.num_received]

    def _started(self, one_pass: LoaderPass) -> None:
        left, order = self._pass, self._order
        if left is not None and order is not None and order.marks and not left.is_exhausted:
            # One process would not have drawn the rest of a pass that was left.
            order.marks.rewind(order.num_drawn)
        before = None
        if self._resumed is not None:
            with rng_state.in_turn:
                before = torch.get_rng_state()
        self._order = _Order(self._resumed, before)

    def __iter__(self) -> Iterator[list[Any]]:
        batches = super().__iter__()
        order = self._order
        if self._comm.rank == 0 and order is not None and order.resumed is None:
            order.begin(self.batches)
        return batches

    def state_dict(self) -> LoaderState:
        """Where the loop is that runs over the loader, the same on all ranks. Local.

        Between two passes, and after one that was left early, it is the beginning of a pass.
        """
        order, last = self._order, self._pass
        if order is not None and order.state and last is not None and last.was_left:
            return LoaderState(batches=0)
        return self.last_state()

    def last_state(self) -> LoaderState:
        """Where the last pass is, or was when it was left, as `state_dict`. Local."""
        order, last = self._order, self._pass
        if order is None or last is None or not order.state:  # nothing drawn since a state, if any
            resumed = self._resumed or (order and order.resumed)
            return resumed or LoaderState(batches=0)
        num = order.first + last.num_received
        if num == order.num_batches or (last.is_of_loader and last.has_ended):
            return LoaderState(batches=0)
        return LoaderState(**{**order.state, "batches": num})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass continue where the state was saved. All ranks must call it, or none.

        Raises UsageError: it is not a state of `state_dict`.
        """
        num = state.get("batches")
        if (
            not isinstance(num, int)
            or num < 0
            or (num and not {*state} >= {"digest", "randomness"})
        ):
            raise UsageError(
                f"{self._comm.rank_label}: {list(state)} is not a state of a loader of "
                "scatter_loader. Load what loader.batch_sampler.state_dict() has returned."
            )
        self._order = self._pass = None
        self._resumed = LoaderState(**state) if num else None  # type: ignore[typeddict-item]

    def _parts(self, one_pass: LoaderPass) -> Iterator[list[Any]]:
        assert self._order is not None  # noqa: S101 - `_started` has made it
        return self._parts_of(one_pass, self._order)

    def _parts_of(self, one_pass: LoaderPass, order: _Order) -> Iterator[list[Any]]:
        """This rank's parts of one pass. The first one is *collective*."""
        rank, size = self._comm.rank, self._comm.size
        for drawn in self._drawn(order):
            for begin, end in drawn.bounds():
                order.num_drawn += 1
                if order.num_drawn <= order.first:
                    continue
                first, last = shard_bounds(end - begin, size, rank, force_equal_length=False)
                is_training = torch.is_grad_enabled()
                if is_training:
                    one_pass.add(last - first, end - begin)
                # An evaluation needs no step of this rank for a batch of which it has no sample.
                if last > first or is_training:
                    if not is_training:
                        order.indices.append(drawn.indices[begin + first : begin + last])
                    yield drawn.samples(begin + first, begin + last)

    def _drawn(self, own: _Order) -> Iterator[_Drawn]:
        """What rank 0 draws: all batches of a pass at once, or some where they have no end."""
        num = None if _is_drawn_at_once(self.batches) else 1
        num_drawn = 0
        while True:
            drawn = self._received(own, num)
            num_drawn += len(drawn.lengths)
            if drawn.is_last:
                own.num_batches = num_drawn
            yield drawn
            if drawn.is_last:
                return
            num = None if num is None else min(2 * num, _MAX_BATCHES)

    def _received(self, own: _Order, num: int | None) -> _Drawn:
        """The next batches of rank 0, on all ranks. *Collective.*"""
        is_first = not own.state
        begins_training = is_first and torch.is_grad_enabled()
        known = contents(self._dataset) if begins_training else {}
        is_compared = begins_training and self._comm.size > 1
        facts = divided_batches(self._comm).facts_now() if is_compared else {}
        message: dict[str, Any] = {}
        error: Exception | None = None
        if self._comm.rank == 0:
            try:
                message = {**self._draw(own, num), "contents": known, "facts": [*facts.items()]}
            except Exception as raised:
                error = raised
                message = {"problem": str(raised), "kind": type(raised).__name__}
            message["random"] = rank_seeds.shared_state()  # the others' have not drawn the order
        purpose = "train" if torch.is_grad_enabled() else "evaluate"
        batch_size = getattr(self.batches, "batch_size", None)
        name = f"a pass over loader {self._number} of scatter_loader to {purpose}, {batch_size=}"
        message = bcast_for(self._comm, name, message)
        if self._comm.rank > 0:
            rank_seeds.follow(message["random"])
        if own.before is not None and is_first:
            with rng_state.in_turn:
                torch.set_rng_state(own.before)
            self._resumed = None
        if error is not None:
            raise error
        if "problem" in message:
            if message["kind"] == UsageError.__name__:
                raise UsageError(message["problem"])
            raise DataError(
                f"{self._comm.rank_label}: the sampler of rank 0, which draws the batches for all "
                f"ranks, raised {message['kind']}: {message['problem']}"
            )
        if is_first:
            own.state = message["state"]
            warn_if_changed(self._comm, known, message["contents"])
            divided_batches(self._comm).compare_facts(self._comm, facts, message["facts"])
            self._warn_if_ranks_get_none(message)
        return _Drawn(message["lengths"], message["samples"], message["is_last"])

    def _draw(self, own: _Order, num: int | None) -> dict[str, Any]:
        """The next batches of the sampler, on rank 0. Local."""
        is_first, resumed = not own.state, own.resumed
        state = LoaderState()
        if is_first and resumed is not None:
            state = resumed
        elif is_first:
            state = LoaderState(randomness=capture(self.batches))
            if own.begun is not None:
                state["begun"] = own.begun
        if own.error is not None:
            raise own.error
        if own.drawing is None:
            with replayed(state.get("begun", state["randomness"]), self.batches):
                own.drawing = iter(self.batches)
        with replayed(state["randomness"] if state is resumed else None, self.batches):
            if own.marks is None:
                own.marks = GeneratorMarks(self.batches)
                own.drawing = own.marks.marked(own.drawing)
            own.marks.forget_before(own.num_drawn)
            drawn = [list(batch) for batch in islice(own.drawing, num)]
            own.marks.drawn()
        lengths = np.array([len(batch) for batch in drawn], dtype=np.int64)
        samples = _packed([index for batch in drawn for index in batch])
        message: dict[str, Any] = {
            "lengths": lengths,
            "samples": samples,
            "is_last": num is None or len(drawn) < num,
        }
        if is_first:
            digest = _digest(lengths, samples)
            if resumed is not None and digest != resumed["digest"]:
                raise UsageError(
                    "scatter_loader: the state was saved in the middle of a pass, and "
                    f"{type(self.batches).__name__} draws another order from the same random "
                    "numbers: the data set, the batch size or the sampler is another one, or the "
                    "sampler has numbers of its own. Give it a torch.Generator as its generator, "
                    "or save and resume between two passes."
                )
            message["state"] = {**state, "digest": digest}
        return message

    def _warn_if_ranks_get_none(self, message: dict[str, Any]) -> None:
        most, size = int(max(message["lengths"], default=0)), self._comm.size
        is_known = message["is_last"] or hasattr(self.batches, "batch_size")
        if is_known and self._comm.rank == 0 and 0 < most < min(size, len(message["samples"])):
            warnings.warn(
                f"scatter_loader: batches of {most} for {size} ranks: {size - most} of the ranks "
                "get no sample in this whole pass. batch_size is that of all ranks together.",
                stacklevel=2,
            )


_MAX_BATCHES = 4096
"""That are drawn at once of a sampler without a length, or with one that stands for no end."""
_MAX_SAMPLES = 1 << 26
"""Of a pass that is drawn at once: half a GiB of indices."""


@dataclass(frozen=True)
class _Drawn:
    """Some batches over all ranks: their lengths, and the indices of their samples in order."""

    lengths: np.ndarray[Any, Any]
    indices: np.ndarray[Any, Any] | list[Any]
    is_last: bool

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Where each batch begins and ends."""
        end = 0
        for length in self.lengths.tolist():
            begin, end = end, end + length
            yield begin, end

    def samples(self, begin: int, end: int) -> list[Any]:
        """The indices of some samples."""
        part = self.indices[begin:end]
        return part.tolist() if isinstance(part, np.ndarray) else part


def _packed(indices: list[Any]) -> np.ndarray[Any, Any] | list[Any]:
    """Indices that are integers as one array; others, such as keys of a dict, as they are."""
    try:
        return np.fromiter(map(operator.index, indices), dtype=np.int64, count=len(indices))
    except (TypeError, OverflowError):
        return indices


def _digest(lengths: np.ndarray[Any, Any], samples: np.ndarray[Any, Any] | list[Any]) -> str:
    raw = samples.tobytes() if isinstance(samples, np.ndarray) else repr(samples).encode()
    return hashlib.sha256(lengths.tobytes() + raw).hexdigest()


def _length(sized: object) -> int | None:
    try:
        return len(sized)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _is_drawn_at_once(batches: Any) -> bool:
    """Whether a pass has a length, and one that can be sent whole."""
    length = _length(batches)
    batch_size = getattr(batches, "batch_size", None)
    return length is not None and length * int(batch_size or 1) <= _MAX_SAMPLES


def _facts(loader: Any) -> dict[str, int | None]:
    """What must be the same on all ranks."""
    read_ahead = loader.num_workers * (loader.prefetch_factor or 0)
    return {
        "the number of samples": _length(loader.dataset),
        "the number of batches": _length(loader.batch_sampler),
        # What is not drawn at once is drawn while the loop runs, on all ranks at the same steps.
        "what its workers read ahead": (
            0 if _is_drawn_at_once(loader.batch_sampler) else read_ahead
        ),
    }


_SCATTER_DATASET = "scatter_dataset"


def divided_by(loader: Any) -> str:
    """What gives each rank its part of a DataLoader already, by name; empty if nothing. Local."""
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
