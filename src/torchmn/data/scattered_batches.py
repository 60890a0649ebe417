"""This rank's parts of the batches that rank 0 draws, for a DataLoader of `scatter_loader`."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch

from torchmn.base.errors import DataError, PerformanceWarning, UsageError
from torchmn.base.warn import warn
from torchmn.comm.collectives import bcast_for
from torchmn.data import rank_seeds, rng_state
from torchmn.data.counted_loader import PassSampler
from torchmn.data.dataset_comparison import contents, contents_of_sampler, warn_if_changed
from torchmn.data.divided_batches import LoaderPass, divided_batches
from torchmn.data.sampler_randomness import (
    GeneratorMarks,
    capture,
    has_drawn_since,
    process_numbers_kept,
    replayed,
    set_process_numbers,
)
from torchmn.data.scatter import shard_bounds
from torchmn.data.sub_dataset import length_of

if TYPE_CHECKING:
    from torchmn.comm import Communicator


class LoaderState(TypedDict, total=False):
    """State of a loader: ``batches`` counts the batches of all ranks that the loop has received.

    The other entries let rank 0 draw the same order again. ``begun`` exists if the sampler has
    drawn numbers when its iterator was made, before the DataLoader draws its own.
    """

    batches: int
    digest: str
    begun: dict[str, Any]
    randomness: dict[str, Any]


@dataclass
class _Order:
    """The order of one pass, as rank 0 draws it."""

    resumed: LoaderState | None
    before: torch.Tensor | None
    """torch's generator when a resumed pass began, before the loader drew a seed of workers."""
    state: LoaderState = field(default_factory=LoaderState)
    """The state to resume the pass from, once its order is drawn; empty before."""
    num_batches: int | None = None
    """Number of batches of the whole pass, once it is known."""
    drawing: Iterator[Sequence[Any]] | None = None
    """The sampler's iterator, on rank 0."""
    begun: dict[str, Any] | None = None
    """State of the generators before the sampler's iterator was made, if that drew numbers."""
    error: Exception | None = None
    """The exception that making the iterator has raised."""
    marks: GeneratorMarks | None = None
    """States of the sampler's generators during the pass, on rank 0."""
    indices: list[Any] = field(default_factory=list)
    """The sample indices of each part that the loader has drawn, in an evaluation only."""
    num_drawn: int = 0
    """Batches over all ranks whose parts the loader has drawn, those that it skipped included."""
    num_begun: int = 0
    """How often the loader has asked for an iterator of the sampler."""
    sampler_contents: dict[str, Any] = field(default_factory=dict)
    """What the sampler holds when a pass that trains begins, to be compared with rank 0's."""
    seeding: Any = None
    """State of the generator that seeds this rank's workers, when the pass began."""

    def begin(self, batches: Iterable[Sequence[Any]]) -> None:
        """Make the sampler's iterator now, as one process does: some draw the whole order then."""
        before = capture(batches)
        try:
            self.drawing = iter(batches)
        except Exception as error:
            self.error = error
        if has_drawn_since(before, batches):
            self.begun = before

    @property
    def first(self) -> int:
        """The number of the batch with which the pass begins."""
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
        generators: if given, what seeds this rank's workers, and the original loader's generator.

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
        self,
        batches: Iterable[Sequence[Any]],
        comm: Communicator,
        dataset: Any = None,
        generators: tuple[Any, Any] = (None, None),
    ) -> None:
        self.batches = batches
        self._dataset = dataset
        self._generators = generators
        super().__init__(comm, "scatter_loader")
        self._order: _Order | None = None
        """Order of the last pass; None before the first, and since a state was loaded."""
        self._resumed: LoaderState | None = None
        """A loaded state that no pass has continued yet."""

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
        # What a loader draws when a pass begins, as the seed of its workers, was drawn before the
        # state was saved: after a resume the generator is set back to `before`.
        self._order = _Order(self._resumed, before)
        if torch.is_grad_enabled():
            self._order.sampler_contents = contents_of_sampler(self.batches)
        if self._generators[0] is not None:
            self._order.seeding = self._generators[0].get_state()

    def __iter__(self) -> Iterator[list[Any]]:
        batches = super().__iter__()
        order = self._order
        if order is not None:
            order.num_begun += 1
            if self._comm.rank == 0 and order.resumed is None:
                order.begin(self.batches)
        return batches

    def state_dict(self) -> LoaderState:
        """The position of the loop over the loader, the same on all ranks. Local.

        Between two passes, and after one that was left early, it is the beginning of a pass.
        """
        order, last = self._order, self._pass
        if order is not None and order.state and last is not None and last.was_left:
            return LoaderState(batches=0)
        return self.last_state()

    def last_state(self) -> LoaderState:
        """As `state_dict`, but keeps the position of a pass that was left early. Local."""
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
        """Yield what rank 0 draws: a whole pass, or portions of an endless one. *Collective.*"""
        num = None if is_drawn_at_once(self.batches) else 1
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
        """Draw the next batches on rank 0 and broadcast them. *Collective.*"""
        is_first = not own.state
        begins_training = is_first and torch.is_grad_enabled()
        known = {**contents(self._dataset), **own.sampler_contents} if begins_training else {}
        facts = divided_batches(self._comm).facts_now(self._comm.size) if is_first else {}
        message: dict[str, Any] = {}
        error: Exception | None = None
        if self._comm.rank == 0:
            try:
                message = {**self._draw(own, num), "contents": known, "facts": [*facts.items()]}
            except Exception as raised:  # the other ranks wait for the broadcast
                error = raised
                message = {"problem": str(raised), "kind": type(raised).__name__}
            message["random"] = rank_seeds.shared_state()  # the others' have not drawn the order
            message["process"] = rank_seeds.process_id()
        batch_size = getattr(self.batches, "batch_size", None)
        name = f"{self._name_of('a pass over')}, {batch_size=}"
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
        if message["process"] != rank_seeds.process_id():  # not a thread, which shares the sampler
            self._draw_too(own, num, message.get("state"))
        if is_first:
            own.state = message["state"]
            warn_if_changed(self._comm, known, message["contents"])
            divided_batches(self._comm).compare_facts(self._comm, facts, message["facts"])
            self._warn_if_ranks_get_none(message)
        return _Drawn(message["lengths"], message["samples"], message["is_last"])

    def _draw_too(self, own: _Order, num: int | None, state: LoaderState | None) -> None:
        """Draw as rank 0 has, whose batches count, from its random numbers. Local; never raises.

        So what a sampler keeps, and generators that the script uses too, are on all ranks those of
        one process. The process's own generators stay as they are.
        """
        # An exception of the sampler is rank 0's as well, which raises it on all ranks.
        with suppress(Exception), process_numbers_kept():
            if state is not None:  # the first draw of a pass
                set_process_numbers(state.get("begun", state["randomness"]))
                for _ in range(own.num_begun if own.resumed is None else 0):
                    own.drawing = iter(self.batches)
                seeding, original = self._generators
                if seeding is not original and not torch.equal(seeding.get_state(), own.seeding):
                    # The loader has drawn the seed of its workers: on rank 0 from the original.
                    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=original)
            resumed = own.resumed if state is not None else None
            self._draw_batches(own, num, resumed or LoaderState())

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
        drawn = self._draw_batches(own, num, state)
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
                    "numbers: the data set, the batch size or the sampler has changed, or the "
                    "sampler has random numbers of its own. Give it a torch.Generator as its "
                    "generator, or save and resume between two passes."
                )
            message["state"] = {**state, "digest": digest}
        return message

    def _draw_batches(self, own: _Order, num: int | None, state: LoaderState) -> list[list[Any]]:
        """The next batches of the sampler; of a resumed pass from the random numbers of ``state``.

        Local.
        """
        if own.drawing is None:
            with replayed(state.get("begun", state["randomness"]), self.batches):
                own.drawing = iter(self.batches)
        with replayed(state["randomness"] if state is own.resumed else None, self.batches):
            if own.marks is None:
                own.marks = GeneratorMarks(self.batches)
                own.drawing = own.marks.marked(own.drawing)
            own.marks.forget_before(own.num_drawn)
            drawn = [list(batch) for batch in islice(own.drawing, num)]
            own.marks.drawn()
        return drawn

    def _warn_if_ranks_get_none(self, message: dict[str, Any]) -> None:
        most, size = int(max(message["lengths"], default=0)), self._comm.size
        is_known = message["is_last"] or hasattr(self.batches, "batch_size")
        if is_known and self._comm.rank == 0 and 0 < most < min(size, len(message["samples"])):
            warn(
                f"scatter_loader: batches of {most} for {size} ranks: {size - most} of the ranks "
                "get no sample in this whole pass. batch_size is that of all ranks together.",
                PerformanceWarning,
            )


_MAX_BATCHES = 4096
"""Batches that are drawn at once from a sampler whose length is unknown, or means endless."""
_MAX_SAMPLES = 1 << 26
"""Samples of a pass that is drawn at once: half a GiB of indices."""


@dataclass(frozen=True)
class _Drawn:
    """Some batches over all ranks: their lengths, and the indices of their samples in order."""

    lengths: np.ndarray[Any, Any]
    indices: np.ndarray[Any, Any] | list[Any]
    is_last: bool

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of each batch in ``indices``."""
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


def is_drawn_at_once(batches: Any) -> bool:
    """Whether the length of a pass is known, and small enough to send all indices at once."""
    length = length_of(batches)
    batch_size = getattr(batches, "batch_size", None)
    return length is not None and length * int(batch_size or 1) <= _MAX_SAMPLES
