"""A stream on many ranks: rank 0 reads it and hands out parts, or each rank reads its share.

Nothing tells how long a stream is, so ranks communicate while they read. In both cases they learn
with a batch how many samples of it each rank has, that the stream has ended, or which error a rank
met. So all make the same number of steps with exact weights: a rank whose share has ended gets
batches of 0 rows until all have ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torchmn.base.errors import DataError, ResultWarning, UsageError
from torchmn.base.torch_private import tree_map
from torchmn.base.warn import warn
from torchmn.comm.collectives import allgather_for, scatter_for
from torchmn.data import rank_seeds
from torchmn.data.batch_rows import rows_of
from torchmn.data.batch_size import num_samples
from torchmn.data.counted_loader import CountedPasses, LoopOfScript, loader_copy
from torchmn.data.divided_batches import LoaderPass, divided_batches, proportion_of
from torchmn.data.scatter import shard_bounds
from torchmn.data.stream_position import positioned
from torchmn.data.stream_reading import (
    END,
    NoRows,
    Parts,
    PartsCollate,
    StreamReading,
    StreamState,
    divided,
    recognizable,
)
from torchmn.data.sub_dataset import length_of

if TYPE_CHECKING:
    from torchmn.comm import Communicator

Batch = TypeVar("Batch", covariant=True)
ReadBy = Literal["rank_0", "each_rank"]
RANK_0, EACH_RANK = "rank_0", "each_rank"

_READY_S = 0.01
"""A batch that takes longer to come was not ready: nothing more is read ahead."""


class StreamLoader(Generic[Batch]):
    """A loader of a stream, made by `scatter_loader`: this rank's part of each batch.

    Each ``for`` is a pass, which all ranks begin, leave and end together.

    >>> loader = torchmn.scatter_loader(iter([torch.arange(3)]), comm, read_by="rank_0")
    >>> [*loader]  # on one rank: all of each batch
    [tensor([0, 1, 2])]
    """

    def __init__(self, stream: ScatteredStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Batch]:
        return self._stream.begin_pass(type(self).__name__)

    def __len__(self) -> int:
        """Number of batches of a pass. Raises TypeError: the stream has no length."""
        if self._stream.length is None:
            raise TypeError("The stream has no length: where it ends is known when it does.")
        return self._stream.length

    def state_dict(self) -> StreamState:
        """The position after the batch that the loop has received last. Local.

        Save it on every rank. After the last batch it is the beginning of a pass.
        """
        return self._stream.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass continue at a state of this rank. All ranks must call it, or none.

        A stream that rank 0 reads continues on any number of ranks: its state alone counts.

        Raises UsageError: it is no state of this loader, or it is that of another rank.
        """
        self._stream.load(state)

    def reshard_state_dict(self, states: Sequence[StreamState], comm: Communicator) -> StreamState:
        """The state that this rank loads, from those of another number of ranks. Local.

        Raises UsageError: in the middle of a pass in which each rank read its share.
        """
        if self._stream.read_by == EACH_RANK and states[0]["batches"]:
            raise UsageError(
                f"{comm.rank_label}: the state was saved in the middle of a pass over a stream of "
                f"which each of {len(states)} ranks read its share, and the shares of {comm.size} "
                "ranks are different. Resume on as many ranks, or save between two passes."
            )
        return states[0]


class _Waiting(NamedTuple):
    """A batch that a rank has read of its share and that was not handed out."""

    num: int
    batch: Any
    position: StreamState


class ScatteredStream(CountedPasses):
    """The passes of a `StreamLoader`. The constructor is *collective*.

    Args:
        loader: a DataLoader of one process, or another iterable of batches.
        comm: the ranks.
        read_by: who reads it.
    """

    def __init__(self, loader: Any, comm: Communicator, read_by: ReadBy) -> None:
        super().__init__(comm, "scatter_loader")
        self.read_by = read_by
        self._loader = _loader_to_read(loader, comm, read_by)
        self._drops_last = read_by == EACH_RANK and bool(getattr(loader, "drop_last", False))
        is_pinned = getattr(loader, "pin_memory", False) and torch.cuda.is_available()
        self._pins = is_pinned and read_by == RANK_0 and comm.rank > 0
        workers = getattr(self._loader, "num_workers", 0)
        self._num_ahead = max(1, workers * (getattr(self._loader, "prefetch_factor", 0) or 0))
        lengths: list[Any] = comm.allgather_obj(length_of(self._loader))
        self.length: int | None = None
        if None not in lengths:
            self.length = min(lengths) if self._drops_last else max(lengths)
        self.state = StreamState(batches=0)
        self._resumed: StreamState | None = None
        self._empty: Any = None
        """A batch of 0 rows, for steps of which this rank has read nothing."""
        self._no_rows: str | None = None
        """Why there is none; "" if there is one, None before the first batch."""

    def load(self, state: Mapping[str, Any]) -> None:
        """See `StreamLoader.load_state_dict`."""
        comm, num = self._comm, state.get("batches")
        saved = state.get("read_by"), state.get("rank"), state.get("size")
        if self.read_by == EACH_RANK:
            is_own = saved == (EACH_RANK, comm.rank, comm.size)
        else:
            is_own = comm.rank > 0 or saved[:2] == (RANK_0, 0)
        if not isinstance(num, int) or num < 0 or (num and not is_own):
            raise UsageError(
                f"{comm.rank_label}: the state of the stream was saved with (read_by, rank, size) "
                f"= {saved}, and this is {(self.read_by, comm.rank, comm.size)}. Each rank that "
                "reads has a position of its own: save loader.state_dict() on every rank, with a "
                "checkpointer or in one file for each rank, and load that of the same rank."
            )
        self.state = cast(StreamState, {**state})
        self._resumed = self.state if num else None

    def begin_pass(self, name: str) -> LoopOfScript:
        """Begin the pass of a ``for``. Its first batch is *collective*."""
        one_pass = LoaderPass(
            divided_batches(self._comm), self._number, is_of_loader=True, is_of_stream=True
        )
        self._pass = one_pass
        self.state, self._resumed = self._resumed or StreamState(batches=0), None
        number = self.state["batches"]
        if self.read_by == EACH_RANK:
            batches = self._of_each_rank(self._begun(one_pass), number, one_pass)
        else:
            reading = self._begun(one_pass) if self._comm.rank == 0 else None
            batches = self._of_rank_0(reading, number, one_pass)
        return LoopOfScript(batches, one_pass, name)

    def _begun(self, one_pass: LoaderPass) -> StreamReading | Exception:
        """Make the iterator of the stream now, as one process does. Local.

        An error is returned, to be raised where the other ranks wait for the first batch.
        """
        if self._comm.rank > 0:
            one_pass.streams.draw_apart()  # the seed of workers, as in `PassSampler.begin_pass`
        num = self.state["batches"]
        try:
            return StreamReading(self._loader, num, self.state if num else None)
        except Exception as error:
            return error
        finally:
            one_pass.streams.draw_together(has_seed_of_workers=True)

    def _of_rank_0(
        self, reading: StreamReading | Exception | None, number: int, one_pass: LoaderPass
    ) -> Iterator[Any]:
        """This rank's parts of the batches that rank 0 reads. *Collective.*"""
        comm, batches = self._comm, divided_batches(self._comm)
        facts = batches.facts_now(comm.size)
        while True:
            errors: list[Exception] = []
            messages: list[dict[str, Any]] | None = None
            if reading is not None:
                try:
                    messages = self._messages(_read(reading))
                except Exception as raised:  # the other ranks wait
                    errors, messages = [raised], [{"problem": _described(raised)}] * comm.size
                # The others have not drawn what this rank has drawn to read the batch.
                common = {"random": rank_seeds.shared_state(), "facts": [*facts.items()]}
                messages = [message | common for message in messages]
            own = scatter_for(comm, self._name_of("a batch of stream"), messages)
            self._raise_first(errors, [own.get("problem")])
            if comm.rank > 0:
                rank_seeds.follow(own["random"])
                batches.compare_facts(comm, facts, own["facts"])
            if own["sizes"] is None:
                self._end(one_pass)
                return
            facts, number = {}, number + 1
            position = reading.position() if isinstance(reading, StreamReading) else StreamState()
            if self._hands_out(own["sizes"], number, position, one_pass):
                yield tree_map(_pinned, own["batch"]) if self._pins else own["batch"]

    def _messages(self, batch: Any) -> list[dict[str, Any]]:
        """What rank 0 sends to each rank after it has read a batch, or `END`. Local."""
        size = self._comm.size
        if batch is END:
            return [{"sizes": None}] * size
        if isinstance(batch, Parts):
            parts = batch.batches
        else:
            num = _num_samples(batch)
            parts = divided(num, size, lambda begin, end: rows_of(batch, begin, end, num))
        sizes = [num for num, _ in parts]
        messages = []
        for num, part in parts:
            if num == 0 and not torch.is_grad_enabled():
                part = None
            if isinstance(part, NoRows):
                raise UsageError(part.why)
            messages.append({"sizes": sizes, "batch": part})
        return messages

    def _of_each_rank(
        self, reading: StreamReading | Exception, number: int, one_pass: LoaderPass
    ) -> Iterator[Any]:
        """The batches of this rank's share. *Collective.*

        Ranks tell each other the sizes of what they have read. With workers that may be several
        batches, of which as many are handed out as all ranks have whose share has not ended.
        """
        comm, batches, is_first = self._comm, divided_batches(self._comm), True
        facts = batches.facts_now(comm.size)
        waiting: deque[_Waiting] = deque()
        position = StreamState()
        has_ended = False
        while True:
            errors: list[Exception] = []
            try:
                has_ended = has_ended or self._read_ahead(reading, waiting, one_pass)
            except Exception as raised:  # the other ranks wait
                errors = [raised]
            own: dict[str, Any] = {
                "problem": _described(errors[0]) if errors else "",
                "sizes": [each.num for each in waiting],
                "has_ended": has_ended,
                "no_rows": self._no_rows,
            }
            if is_first:
                own |= {
                    "facts": [*facts.items()],
                    "first": recognizable(waiting[0].batch) if waiting else "",
                }
            everyone = allgather_for(comm, self._name_of("shares of stream"), own)
            self._raise_first(errors, [theirs["problem"] for theirs in everyone])
            if is_first:
                batches.compare_facts(comm, facts, everyone[0]["facts"])
                self._warn_if_equal([theirs["first"] for theirs in everyone])
            is_first = False
            num, is_last = self._agreed(everyone)
            steps = [[*each["sizes"], *[0] * num][:num] for each in everyone]
            if torch.is_grad_enabled() and 0 in (size for sizes in steps for size in sizes):
                self._share_empty([each["no_rows"] for each in everyone])
            for sizes in zip(*steps, strict=True):
                if waiting:
                    _, batch, position = waiting.popleft()
                else:  # new containers for each step, from which a script may take fields out
                    batch = None if self._empty is None else rows_of(self._empty, 0, 0, 0)
                number += 1
                if self._hands_out(sizes, number, position, one_pass):
                    yield batch
            if is_last:
                self._end(one_pass)
                return

    def _read_ahead(
        self, reading: StreamReading | Exception, waiting: deque[_Waiting], one_pass: LoaderPass
    ) -> bool:
        """Read this rank's next batches; returns whether its share has ended. Local."""
        while len(waiting) < self._num_ahead:
            begin_s = time.monotonic()
            # Shares differ, and so do the random numbers that reading them draws in this process.
            one_pass.streams.draw_apart()
            try:
                batch = _read(reading)
            finally:
                one_pass.streams.draw_together()
            if batch is END:
                return True
            num = _num_samples(batch)
            if self._no_rows is None:
                try:
                    self._empty, self._no_rows = tree_map(_cloned, rows_of(batch, 0, 0, num)), ""
                except UsageError as error:
                    self._no_rows = str(error)
            waiting.append(_Waiting(num, batch, cast(StreamReading, reading).position()))
            if time.monotonic() - begin_s > _READY_S:
                break
        return False

    def _agreed(self, everyone: Sequence[Mapping[str, Any]]) -> tuple[int, bool]:
        """The number of batches that are handed out now, and whether they are the last. Local."""
        lengths = [len(each["sizes"]) for each in everyone]
        ended = [each["has_ended"] for each in everyone]
        if self._drops_last:  # what only some ranks have samples of is not full
            num = min(lengths)
            pairs = zip(lengths, ended, strict=True)
            return num, any(is_ended and length == num for length, is_ended in pairs)
        live = [length for length, is_ended in zip(lengths, ended, strict=True) if not is_ended]
        return (min(live), False) if live else (max(lengths), True)

    def _share_empty(self, no_rows: Sequence[str | None]) -> None:
        """Give ranks that have read nothing a batch of 0 rows of another rank. *Collective.*

        Args:
            no_rows: for each rank, why it has no batch of 0 rows; "" if it has, None if unknown.

        Raises UsageError, on all ranks: the batches of a rank cannot be divided.
        """
        for rank, problem in enumerate(no_rows):
            if problem:
                raise UsageError(
                    "scatter_loader: the share of a rank has ended before that of others, and it "
                    f"needs batches of 0 rows. On rank {rank} {problem} Or pass drop_last=True, "
                    "with which all ranks end together."
                )
        if None in no_rows:
            empty = self._comm.bcast_obj(self._empty, no_rows.index(""))
            if self._no_rows is None:
                self._empty, self._no_rows = empty, ""

    def _hands_out(
        self, sizes: Sequence[int], number: int, position: StreamState, one_pass: LoaderPass
    ) -> bool:
        """Note the next batch; returns whether this rank receives a part of it. Local."""
        comm, is_training = self._comm, torch.is_grad_enabled()
        own = {"batches": number, "read_by": self.read_by, "rank": comm.rank, "size": comm.size}
        self.state = cast(StreamState, {**position, **own})
        if is_training:
            one_pass.add(sizes[comm.rank], sum(sizes), proportion_of(sizes))
        # An evaluation needs no step of this rank for a batch of which it has no sample.
        is_received = is_training or sizes[comm.rank] > 0
        one_pass.num_drawn += is_received
        return is_received

    def _raise_first(self, own: list[Exception], problems: Sequence[str | None]) -> None:
        """Raise this rank's error, or tell of another rank's. All ranks do so at the same batch."""
        if own:
            raise own.pop()  # its traceback has the frame that holds it: a cycle keeps the workers
        for rank, problem in enumerate(problems):
            if problem:
                raise DataError(
                    f"{self._comm.rank_label}: rank {rank}, which reads samples of the stream for "
                    f"the same steps, raised {problem}"
                )

    def _end(self, one_pass: LoaderPass) -> None:
        self.state, one_pass.is_exhausted = StreamState(batches=0), True

    def _warn_if_equal(self, firsts: Sequence[str]) -> None:
        own = firsts[self._comm.rank]
        if own and (other := firsts.index(own)) < self._comm.rank:
            warn(
                f"{self._comm.rank_label}: this rank and rank {other} have read the same first "
                "batch of a stream. With read_by='each_rank' the data set of each rank must yield "
                "its own share, as after split_dataset_by_node or webdataset's split_by_node. If "
                "it yields all samples, pass read_by='rank_0'.",
                ResultWarning,
            )


def _loader_to_read(loader: Any, comm: Communicator, read_by: ReadBy) -> Any:
    """The loader that a rank reads. With a batch size, it makes the batches of ranks. Local."""
    if not isinstance(loader, DataLoader):
        return loader
    own: dict[str, Any] = {
        "generator": rank_seeds.rank_generator(loader.generator, comm.rank),
        "_iterator": None,  # persistent workers of the original
    }
    batches: Any = loader.batch_sampler
    if batches is not None and read_by == RANK_0:
        own["collate_fn"] = PartsCollate(loader.collate_fn, comm.size)
    elif batches is not None:
        begin, end = shard_bounds(
            loader.batch_size or 1, comm.size, comm.rank, force_equal_length=False
        )
        sampler = type(batches)(batches.sampler, end - begin, loader.drop_last)
        own |= {"batch_size": end - begin, "batch_sampler": sampler}
    return positioned(loader_copy(loader, **own))


def _read(reading: StreamReading | Exception) -> Any:
    """The next batch, or `END`. Raises what making the iterator has raised."""
    if isinstance(reading, Exception):
        raise reading
    return reading.read()


def _num_samples(batch: Any) -> int:
    num = num_samples(batch)
    if num is None:
        raise UsageError(
            f"scatter_loader: nothing in a batch of the stream, a {type(batch).__name__}, tells "
            "the number of its samples. Let it be a tensor or array with a row for each sample, or "
            "a tuple, list or dict of them; or give the DataLoader a batch_size."
        )
    return num


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _pinned(value: Any) -> Any:
    return value.pin_memory() if isinstance(value, Tensor) else value


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
