"""What a rank does during its steps: phases of the training thread, exchanges, and what they sent.

The phases of one thread do not overlap: entering one ends the other, and each moment belongs to one
of them. So a step costs one clock read for each change of phase. Whatever else is in a step, such
as an exchange on the engine's thread, is noted beside them.

A step ends with a step of the optimizer. Of several optimizers the one that steps most often
counts: the first that steps, until it is gone or another one has stepped three times without it.
The steps of the others are parts of its steps.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torchmn.record.records import (
    GradientTimes,
    Line,
    Phase,
    SettingsChanged,
    Step,
    Value,
)
from torchmn.record.timeline import DIGITS, Exchange, Mark, StepClock, Traffic

if TYPE_CHECKING:
    from torchmn.record.step_trace import StepTrace

_MAX_MARKS = 4096
_LOSS_PERIOD_S = 0.5
_MAX_OTHERS = 2
_GRADIENT_STEPS = frozenset({3, 10, 30, 100})
_GRADIENT_PERIOD = 500
_UNTRAINED: frozenset[Phase] = frozenset({"data", "other", "evaluation"})


@dataclass(frozen=True)
class GradientFacts:
    """A parameter whose gradient is timed."""

    numel: int
    nbytes: int
    is_small: bool


@dataclass(slots=True)
class _Step:
    """A step under way, or one that has ended and whose marks may not be over yet."""

    at_s: float
    begin: Mark
    marks: list[tuple[Mark, Phase]]
    folded: dict[Phase, float] = field(default_factory=dict)
    samples: int | None = None
    gradients: list[tuple[GradientFacts, Mark]] = field(default_factory=list)
    backward: Mark = None
    loss: Any = None
    # Known when it has ended:
    number: int = 0
    end: Mark = None
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    core_time: CoreTime | None = None


class StepRecorder:
    """Notes what the training thread does and writes a line for each step. One per process.

    The thread that makes it is the training thread, until a step ends on another one. Its other
    methods ignore calls of other threads, unless they say otherwise.
    """

    def __init__(self, write: Callable[[Line], None], clock: StepClock) -> None:
        self.clock = clock
        self.exchanges: deque[Exchange] = deque()
        """Those that have ended, in the order of their end. Written by engines."""
        self.running: Exchange | None = None
        self.num_steps = 0
        """Steps that have ended since the recorder was made."""
        self.on_step: list[Callable[[int], None]] = []
        """Called with the number of the step that begins, after each step."""
        self.traces: list[StepTrace] = []
        """Those that are running."""
        self._write = write
        self._training = threading.get_ident()
        self._phase: Phase = "other"
        self._whole = 0
        self._has_begun = False
        self._step = self._new_step(clock.mark())
        self._ended: deque[_Step] = deque()
        self._comms: list[Traffic] = []
        self._traffic: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._core_time = CoreTimeReader()
        self._leader: Callable[[], object] = _no_optimizer
        self._others: Counter[int] = Counter()
        self._settings: dict[str, str] = {}
        self._loss_at_s = 0.0
        self._reports_loss = True

    # ---- phases ----

    def enter(self, phase: Phase, *, in_backward: bool = False) -> Phase | None:
        """Begin a phase, and return the one that it interrupts, for `leave`.

        None if it does not count: on another thread, inside of the same phase, or of one that is
        counted as a whole. ``in_backward``: called by autograd, whose thread may be another one.
        """
        before = self._phase
        if (
            before == phase
            or self._whole
            or not (in_backward or threading.get_ident() == self._training)
        ):
            return None
        self._switch(phase)
        return before

    def leave(self, before: Phase | None) -> None:
        """Continue with the phase that was interrupted."""
        if before is not None and not self._whole:
            self._switch(before)

    def enter_whole(self, phase: Phase) -> Phase | None:
        """As `enter`, for one that is counted as a whole, whatever is entered before its end."""
        if threading.get_ident() != self._training:
            return None
        before = self._phase
        if not self._whole:
            self._switch(phase)
        self._whole += 1
        return before

    def leave_whole(self, before: Phase | None) -> None:
        """End what `enter_whole` began."""
        if before is not None:
            self._whole -= 1
            if not self._whole:
                self._switch(before)

    def _switch(self, phase: Phase) -> None:
        self._phase = phase
        marks = self._step.marks
        marks.append((self.clock.mark(), phase))
        if len(marks) > _MAX_MARKS:  # as in a long evaluation
            last = len(marks) - 1 if self.clock.is_host else len(marks) // 2
            if self.clock.is_over(marks[last][0]):  # a GPU may be that far behind
                _add_up(self.clock, marks[:last], marks[last][0], self._step.folded)
                del marks[:last]

    def _relabel(self, phase: Phase, untrained: frozenset[Phase]) -> None:
        """What came just before was a part of this phase, as is clear now."""
        marks = self._step.marks
        for index in range(len(marks) - 1, -1, -1):
            mark, before = marks[index]
            if before not in untrained:
                return
            marks[index] = mark, phase

    # ---- what a loop does ----

    def data_begins(self) -> Phase | None:
        """The loop asks for a batch. Returns the phase for `data_ends`."""
        self._begin_first_step()
        return self.enter("data")

    def data_ends(self, before: Phase | None) -> None:
        """The batch is there; ``before`` is continued where it may be waiting for data."""
        if before is not None:
            self.leave(before if before in ("evaluation", "checkpoint") else "other")

    def forward_begins(self, num_samples: int | None, *, is_training: bool) -> None:
        """The model runs; not in training if gradients are off, where a batch was for evaluation.

        ``num_samples``: of its batch, if it is known.
        """
        self._begin_first_step()
        if is_training:
            if num_samples is not None and self._phase not in ("forward", "backward"):
                self._step.samples = (self._step.samples or 0) + num_samples
            self.enter("forward")
        elif not self._whole and threading.get_ident() == self._training:
            self.enter("evaluation")
            self._relabel("evaluation", _UNTRAINED)

    def backward_begins(self, loss: object) -> bool:
        """Autograd is called; whether `backward_ends` must be called. ``loss``: on what."""
        self._begin_first_step()
        if self._phase == "backward" or threading.get_ident() != self._training:
            return False
        if self._phase == "other":
            self._relabel("forward", frozenset({"other"}))  # of a model without a hook
        self._note_loss(loss)
        if self.enter("backward") is None:
            return False
        self._step.backward = self._step.backward or self._step.marks[-1][0]
        return True

    def backward_ends(self) -> None:
        """Autograd has returned."""
        self.leave("other")

    def gradient_ready(self, facts: GradientFacts) -> None:
        """Called by autograd, in steps in which gradients are timed."""
        self._step.gradients.append((facts, self.clock.mark()))

    def wants_gradients(self) -> bool:
        """Whether gradients should be timed in the step that begins now."""
        number = self.num_steps
        return number in _GRADIENT_STEPS or (number > 0 and number % _GRADIENT_PERIOD == 0)

    def optimizer_stepped(self, optimizer: object, number: int | None = None) -> bool:
        """An optimizer has stepped; ``number`` is that of its step, by default counted here.

        Returns whether this was the end of a step.
        """
        if self._leader() is not optimizer:
            self._others[id(optimizer)] += 1
            if self._leader() is not None and self._others[id(optimizer)] <= _MAX_OTHERS:
                return False
            self._leader = weakref.ref(optimizer)
        self._others.clear()
        self.end_step(self.num_steps if number is None else number)
        return True

    def optimizer_closed(self, optimizer: object) -> None:
        """It will not step again: the next one that steps counts."""
        if self._leader() is optimizer:
            self._leader = _no_optimizer

    def end_step(self, number: int, *, samples: int | None = None) -> None:
        """A step has ended, and the next one begins. ``samples``: if forward has not seen them."""
        self._training = threading.get_ident()
        ended = self._step
        ended.number, ended.end = number, self.clock.mark()
        ended.sent, ended.received = self._new_traffic()
        ended.samples = ended.samples if samples is None else samples
        ended.core_time = self._core_time.since_last()
        self._ended.append(ended)
        self._step = self._new_step(ended.end)
        self.num_steps += 1
        self.write_ended()
        for callback in self.on_step:
            callback(number + 1)

    def write_ended(self) -> None:
        """Write the steps whose marks are over."""
        while self._ended and self.clock.is_over(self._ended[0].end):
            self._write_step(self._ended.popleft())

    def rest(self) -> dict[Phase, float]:
        """Seconds of each phase since the last step."""
        if not self.clock.is_host or not self._has_begun:
            return {}
        totals = dict(self._step.folded)
        _add_up(self.clock, self._step.marks, self.clock.mark(), totals)
        return _rounded(totals)

    # ---- what is noted beside the phases ----

    def follow(self, comm: Traffic) -> None:
        """Count the bytes of a communicator."""
        if comm not in self._comms:
            self._comms.append(comm)

    def forget(self, comm: Traffic) -> None:
        """The communicator has ended."""
        if comm in self._comms:
            self._comms.remove(comm)
            self._traffic = self._total_traffic()

    def exchange(self, comm: Traffic, number: int, nbytes: int, ready: Mark) -> Exchange:
        """A sum is handed over, whose gradients were ready at a mark, or just now. Any thread."""
        return Exchange(self, comm, number, nbytes, ready)

    def settings_are(self, step: int, settings: dict[str, str]) -> None:
        """Note settings, if they have changed."""
        changed = {k: v for k, v in settings.items() if self._settings.get(k) != v}
        if changed:
            self._settings |= changed
            self._write(SettingsChanged(step=step, settings=changed))

    def value(self, name: str, value: float, step: int | None = None) -> None:
        """Note a number that the script reports. Any thread."""
        if name == "loss":
            self._reports_loss = False
        at = self.num_steps if step is None else step
        self._write(Value(step=at, name=name, value=value))

    def _note_loss(self, loss: object) -> None:
        """Keep what backward is called on, now and then, without waiting for a GPU."""
        step = self._step
        if not self._reports_loss or step.at_s - self._loss_at_s < _LOSS_PERIOD_S:
            return
        import torch

        found = loss[0] if isinstance(loss, Sequence) and len(loss) == 1 else loss
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            return
        if torch.compiler.is_compiling() or found.is_complex():
            return
        if found.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # every replay of the graph would write to the copy
        self._loss_at_s = step.at_s
        value = found.detach()
        if value.is_cuda:  # there when the marks of the step are over, and not read before
            host = torch.empty_like(value, device="cpu", pin_memory=True)
            step.loss = host.copy_(value, non_blocking=True)
        else:
            step.loss = value.clone() if not self.clock.is_host else float(value)

    def _new_traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        before, self._traffic = self._traffic, self._total_traffic()
        sent, received = (
            {host: n for host, total in now.items() if (n := total - then.get(host, 0))}
            for now, then in zip(self._traffic, before, strict=True)
        )
        return sent, received

    def _total_traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        if len(self._comms) == 1:
            return self._comms[0].traffic()
        sent: dict[str, int] = {}
        received: dict[str, int] = {}
        for comm in self._comms:
            for total, own in zip((sent, received), comm.traffic(), strict=True):
                for host, nbytes in own.items():
                    total[host] = total.get(host, 0) + nbytes
        return sent, received

    def close(self) -> None:
        """Write what is left and let go of files."""
        self.write_ended()
        self._core_time.close()

    # ---- steps ----

    def _begin_first_step(self) -> None:
        """What came before the first batch was no step: imports, data sets, models."""
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
        if ended.loss is not None:
            self._write(Value(step=ended.number, name="loss", value=float(ended.loss)))


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
    """In place of a reference to one."""


class CoreTime(NamedTuple):
    """Seconds: the training thread waited for a core and ran, the process's other threads ran."""

    run_queue_s: float
    cpu_s: float
    others_cpu_s: float


class CoreTimeReader:
    """Reads the counters of the thread that calls `since_last`. Local."""

    def __init__(self) -> None:
        self._thread = 0
        self._schedstat = -1
        """The descriptor of the kernel's file for this thread, if it is open."""
        self._last_ns = (0, 0, 0)

    def since_last(self) -> CoreTime | None:
        """Of the time since the last call of this thread; None where the system does not tell."""
        try:
            if self._schedstat < 0 or self._thread != threading.get_native_id():
                self._open()
            before_ns, self._last_ns = self._last_ns, self._read_ns()
        except (OSError, ValueError, IndexError):  # another system, or a kernel without it
            return None
        run_s, queue_s, process_s = (
            (now - before) / 1e9 for now, before in zip(self._last_ns, before_ns, strict=True)
        )
        return CoreTime(queue_s, run_s, max(0.0, process_s - run_s))

    def close(self) -> None:
        """Close the file of the kernel, which `since_last` opens again."""
        if self._schedstat >= 0:
            os.close(self._schedstat)
            self._schedstat = -1

    def _open(self) -> None:
        self.close()
        self._thread = threading.get_native_id()
        path = f"/proc/self/task/{self._thread}/schedstat"
        self._schedstat = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._last_ns = self._read_ns()

    def _read_ns(self) -> tuple[int, int, int]:
        """Nanoseconds that the thread ran and waited for a core, and that its process ran."""
        run_ns, queue_ns = os.pread(self._schedstat, 64, 0).split()[:2]
        return int(run_ns), int(queue_ns), time.process_time_ns()
