"""Record a rank's steps: the phases of the training thread, the exchanges, and the bytes sent.

Phases do not overlap: entering one ends the other, and each moment belongs to exactly one. So a
step costs one clock read per change of phase. Events on other threads, such as exchanges on the
engine's thread, are recorded separately.

A step ends with a step of the optimizer. With several optimizers, the steps of one of them count:
the first that steps, until it is gone or another one has stepped three times without it. Steps of
the other optimizers are parts of its steps.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from torchmn.base.events import Communicator, Gradient, Observer, Stage
from torchmn.base.torch_private import at_end_of_backward, current_graph_task_id
from torchmn.record.core_time import CoreTime, CoreTimeReader
from torchmn.record.records import (
    GradientTimes,
    Line,
    Phase,
    SettingsChanged,
    Step,
    Value,
)
from torchmn.record.timeline import DIGITS, Exchange, Mark, StepClock, TrainingThread

if TYPE_CHECKING:
    from torchmn.record.step_trace import StepTrace

_MAX_MARKS = 4096
_MAX_OTHERS = 2
# Phases that include all that is done in them, such as exchanges.
_WHOLE = ("evaluation", "checkpoint")
_UNTRAINED: frozenset[Phase] = frozenset({"data", "other", "evaluation"})


@dataclass(slots=True)
class _Step:
    """A step that runs, or one that has ended but whose marks a GPU may not have passed yet."""

    at_s: float
    begin: Mark
    marks: list[tuple[Mark, Phase]]
    folded: dict[Phase, float] = field(default_factory=dict)
    samples: int | None = None
    gradients: list[tuple[Gradient, Mark]] = field(default_factory=list)
    backward: Mark = None
    # Known when it has ended:
    number: int = 0
    end: Mark = None
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    core_time: CoreTime | None = None


class StepRecorder(Observer):
    """Follows the training thread and writes a line for each step. One per process.

    The training thread is the one that creates it, until a step ends on another thread. Calls of
    other threads are ignored unless a method says otherwise.
    """

    def __init__(self, write: Callable[[Line], None], clock: StepClock) -> None:
        self.clock = clock
        self.exchanges: deque[Exchange] = deque()
        """Exchanges that have ended, in the order of their end. Appended by engines' threads."""
        self._ready: dict[int, Mark] = {}  # by the bucket
        self._queued: dict[int, Exchange] = {}  # by the bucket, until its sum is there
        self._running: Exchange | None = None
        self._coding: dict[int, Mark] = {}  # when each thread began to encode or decode
        self.num_steps = 0
        """Steps that have ended since the recorder was made."""
        self.on_step: list[Callable[[int], None]] = []
        """Called with the number of the step that begins, after each step."""
        self.traces: list[StepTrace] = []
        """Traces that are running."""
        self._write = write
        self._training = TrainingThread(clock)
        self._phase: Phase = "other"
        # The phases that have not ended, each with the one that it has interrupted.
        self._stack: list[tuple[str, Phase]] = []
        self._whole = 0
        self._is_data_told = False  # whether a loader has told of its batches in this step
        self._has_begun = False
        self._step = self._new_step(clock.mark())
        self._ended: deque[_Step] = deque()
        self._comms: list[Communicator] = []
        self._traffic = self._total_traffic()
        self._core_time = CoreTimeReader()
        self._leader: Callable[[], object] = _no_optimizer
        self._others: Counter[int] = Counter()
        self._stepping: Callable[[], object] = _no_optimizer
        self._settings: dict[str, str] = {}

    # ---- phases ----

    def phase(self, name: str, begins: bool) -> None:
        """See `Observer.phase`."""
        if name in ("encode", "decode"):
            self._note_coding(name, begins)
        if not self._training.is_current():
            return
        if name in ("backward", "pack"):
            self._begin_backward()
            if name == "backward" or not self.clock.is_host:  # a stream packs within backward
                return
            name = "exchange"
        if begins:
            self._begin(cast(Phase, name))
        else:
            self._end(name)

    def _begin(self, phase: Phase) -> None:
        self._stack.append((phase, self._phase))
        if phase in _WHOLE:
            self._whole += 1
            if self._whole == 1:
                self._switch(phase)
        elif not self._whole:
            self._is_data_told |= phase == "data"
            if phase == "data":
                self._begin_first_step()
            self._switch(phase)

    def _end(self, name: str) -> None:
        """End a phase: continue with the one before, or with ``other`` if that has ended too."""
        if all(begun != name for begun, _ in self._stack):
            return  # it began before there was a recorder, or on another thread
        before: Phase = "other"
        begun = ""
        while begun != name:  # what has raised may lack its end
            begun, before = self._stack.pop()
            self._whole -= begun in _WHOLE
        if name in ("data", "optimizer") and before in ("forward", "backward"):
            before = "other"
        if not self._whole:
            self._switch(before)

    def _switch(self, phase: Phase) -> None:
        if phase == self._phase:
            return
        self._phase = phase
        marks = self._step.marks
        marks.append((self.clock.mark(), phase))
        if len(marks) > _MAX_MARKS:  # as in a long evaluation
            last = len(marks) - 1 if self.clock.is_host else len(marks) // 2
            if self.clock.is_over(marks[last][0]):  # a GPU may be that far behind
                _add_up(self.clock, marks[:last], marks[last][0], self._step.folded)
                del marks[:last]

    def _relabel(self, phase: Phase, untrained: frozenset[Phase]) -> None:
        """Count the ``untrained`` phases just before now as a part of ``phase``."""
        marks = self._step.marks
        for index in range(len(marks) - 1, -1, -1):
            mark, before = marks[index]
            if before not in untrained:
                return
            marks[index] = mark, phase

    def _note_coding(self, name: str, begins: bool) -> None:
        """Add the time in which a codec works to the exchange that runs. Any thread."""
        # By thread: the engine may encode one bucket while the training thread encodes another.
        thread, now = threading.get_ident(), self.clock.mark()
        began = self._coding.pop(thread, now)
        if begins:
            self._coding[thread] = now
        elif self._running is not None:
            self._running.coding.append((name, began, now))

    # ---- what a loop does ----

    def forward(self, num_samples: int | None, *, is_training: bool) -> None:
        """See `Observer.forward`. A forward without gradients counts as evaluation.

        If no loader of torchmn reports when it prepares a batch, the time between a step and the
        next forward counts as ``data``.
        """
        self._begin_first_step()
        if self._whole or not self._training.is_current():
            return
        if not is_training:
            self._switch("evaluation")
            self._relabel("evaluation", _UNTRAINED)
            return
        if num_samples is not None and self._phase not in ("forward", "backward"):
            self._step.samples = (self._step.samples or 0) + num_samples
        if not self._is_data_told and self._phase == "other":
            self._relabel("data", frozenset({"other"}))
        self._switch("forward")

    def _begin_backward(self) -> None:
        """Enter the phase ``backward``, at the first gradient of a pass."""
        if self._whole or self._phase in ("backward", "exchange", "encode", "decode"):
            return
        self._begin_first_step()
        self._switch("backward")
        self._step.backward = self._step.backward or self._step.marks[-1][0]
        # Autograd drops this callback if the pass raises: the next phase then ends this one.
        if current_graph_task_id() != -1:
            at_end_of_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        if self._phase == "backward":
            self._switch("other")

    def gradient(self, gradient: Gradient) -> None:
        """See `Observer.gradient`. Called by autograd."""
        self._begin_backward()
        self._step.gradients.append((gradient, self.clock.mark()))

    def step_begins(self, optimizer: object) -> None:
        """See `Observer.step_begins`. A step inside another optimizer's step is a part of that."""
        # Weak references: the record must not keep an optimizer and its model alive.
        if self._stepping() in (None, optimizer):
            self._stepping = weakref.ref(optimizer)
            self.phase("optimizer", True)

    def step_ended(self, optimizer: object, number: int | None, samples: int | None = None) -> None:
        """See `Observer.step_ended`."""
        if samples is not None and number is not None:  # it took part in a step of the others
            self.end_step(number, samples=samples)
            return
        if self._stepping() is not optimizer:
            return
        self._stepping = _no_optimizer
        self.phase("optimizer", False)
        if number is not None:
            self._count(optimizer, number)

    def _count(self, optimizer: object, number: int) -> None:
        if self._leader() is not optimizer:
            self._others[id(optimizer)] += 1
            if self._leader() is not None and self._others[id(optimizer)] <= _MAX_OTHERS:
                return
            self._leader = weakref.ref(optimizer)
        self._others.clear()
        self.end_step(number)

    def optimizer_closed(self, optimizer: object) -> None:
        """See `Observer.optimizer_closed`. From now on the next optimizer that steps counts."""
        if self._leader() is optimizer:
            self._leader = _no_optimizer

    def end_step(self, number: int, *, samples: int | None = None) -> None:
        """End a step and begin the next one. ``samples`` replaces the count made in forward."""
        if self._training.move():
            self._stack.clear()
        ended = self._step
        ended.number, ended.end = number, self.clock.mark()
        ended.sent, ended.received = self._new_traffic()
        ended.samples = ended.samples if samples is None else samples
        ended.core_time = self._core_time.since_last()
        self._ended.append(ended)
        self._step = self._new_step(ended.end)
        self._is_data_told = False
        self.num_steps += 1
        self.write_ended()
        for callback in self.on_step:
            callback(number + 1)

    def write_ended(self) -> None:
        """Write the ended steps whose marks the clock has passed."""
        while self._ended and self.clock.is_over(self._ended[0].end):
            self._write_step(self._ended.popleft())

    def rest(self) -> dict[Phase, float]:
        """Return the seconds of each phase since the last step."""
        if not self.clock.is_host or not self._has_begun:
            return {}
        totals = dict(self._step.folded)
        _add_up(self.clock, self._step.marks, self.clock.mark(), totals)
        return _rounded(totals)

    # ---- what is noted beside the phases ----

    def communicator(self, comm: Communicator, begins: bool) -> None:
        """See `Observer.communicator`. Counts the bytes of all that are not finalized."""
        if begins and comm not in self._comms:
            self._comms.append(comm)
        elif not begins and comm in self._comms:
            self._comms.remove(comm)
            self._traffic = self._total_traffic()

    def exchange(self, comm: Communicator, block: Any, bucket: int | None, stage: Stage) -> None:
        """See `Observer.exchange`. Any thread."""
        if bucket is None:
            return
        key = id(block)
        # Engines' threads call this without a lock: operations on dicts and deques are atomic.
        # A mark costs something on a GPU: where a bucket was ready it needs none when it is queued.
        now = self._ready.pop(key, None) if stage == "queued" else None
        now = self.clock.mark() if now is None else now
        if stage == "ready":
            self._ready[key] = now
        elif stage == "queued":
            self._queued[key] = Exchange(bucket, block.buffer.nbytes, ready=now)
        elif stage == "started" and key in self._queued:
            self._running = running = self._queued[key]
            # The counter is the communicator's: the bytes before this exchange are subtracted.
            running.started, running.sent_nbytes = now, -comm.num_sent_nbytes
        elif stage == "ended" and key in self._queued:
            ended, self._running = self._queued.pop(key), None
            ended.ended, ended.sent_nbytes = now, ended.sent_nbytes + comm.num_sent_nbytes
            self.exchanges.append(ended)

    def settings(self, step: int, values: dict[str, str]) -> None:
        """See `Observer.settings`. Writes those that have changed."""
        changed = {k: v for k, v in values.items() if self._settings.get(k) != v}
        if changed:
            self._settings |= changed
            self._write(SettingsChanged(step=step, settings=changed))

    def value(self, name: str, value: float, step: int | None = None) -> None:
        """Record a number that the script reports. From any thread."""
        at = self.num_steps if step is None else step
        self._write(Value(step=at, name=name, value=value))

    def _new_traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        before, self._traffic = self._traffic, self._total_traffic()
        sent, received = (dict(now - then) for now, then in zip(self._traffic, before, strict=True))
        return sent, received

    def _total_traffic(self) -> tuple[Counter[str], Counter[str]]:
        sent, received = Counter[str](), Counter[str]()
        for comm in self._comms:
            own_sent, own_received = comm.traffic()
            sent.update(own_sent)
            received.update(own_received)
        return sent, received

    def close(self) -> None:
        """Write the ended steps and close files."""
        self.write_ended()
        self._core_time.close()

    # ---- steps ----

    def _begin_first_step(self) -> None:
        """Begin the first step at its first batch, not at imports, data sets and models."""
        if not self._has_begun:
            self._has_begun = True
            if self._phase == "other" and not self._whole:
                self._new_traffic()
                self._core_time.since_last()
                self._step = self._new_step(self.clock.mark())

    def _new_step(self, begin: Mark) -> _Step:
        at_s = float(begin) if self.clock.is_host else time.perf_counter()
        return _Step(at_s, begin, [(begin, self._phase)])

    def _write_step(self, ended: _Step) -> None:
        clock, begin = self.clock, ended.begin
        _add_up(clock, ended.marks, ended.end, ended.folded)
        exchanges = []
        while self.exchanges and clock.is_over(mark := self.exchanges[0].ended):
            if clock.seconds(mark, ended.end) < 0:  # it ended in the next step
                break
            exchanges.append(self.exchanges.popleft())
        for trace in self.traces:
            trace.add_step(ended.number, ended.marks, ended.end, exchanges)
        core_time = {} if ended.core_time is None else ended.core_time._asdict()
        self._write(
            Step(
                step=ended.number,
                at_s=round(ended.at_s, DIGITS),
                seconds=round(clock.seconds(begin, ended.end), DIGITS),
                phases=_rounded(ended.folded),
                samples=ended.samples,
                sent=ended.sent,
                received=ended.received,
                buckets=[exchange.line(clock, begin) for exchange in exchanges],
                **{name: round(seconds, DIGITS) for name, seconds in core_time.items()},
            )
        )
        if ended.gradients and ended.backward is not None:
            facts = [facts for facts, _ in ended.gradients]
            self._write(
                GradientTimes(
                    step=ended.number,
                    ready_s=[
                        round(clock.seconds(ended.backward, ready), DIGITS)
                        for _, ready in ended.gradients
                    ],
                    numel=[each.numel for each in facts],
                    nbytes=[each.nbytes for each in facts],
                    is_small=[each.is_small for each in facts],
                )
            )


def _add_up(
    clock: StepClock,
    marks: Iterable[tuple[Mark, Phase]],
    end: Mark,
    totals: dict[Phase, float],
) -> None:
    """Add the seconds between marks to the totals of their phases."""
    moments = iter(marks)
    mark, phase = next(moments)
    for following, next_phase in moments:
        totals[phase] = totals.get(phase, 0.0) + clock.seconds(mark, following)
        mark, phase = following, next_phase
    totals[phase] = totals.get(phase, 0.0) + clock.seconds(mark, end)


def _rounded(totals: dict[Phase, float]) -> dict[Phase, float]:
    return {phase: value for phase, s in totals.items() if (value := round(s, DIGITS)) > 0}


def _no_optimizer() -> None:
    """Return None, in place of a weak reference to an optimizer."""
