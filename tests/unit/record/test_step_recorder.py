"""What the recorder makes of its calls, on a clock that tests move."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from torchmn.record.records import GradientTimes, Line, Step, Value
from torchmn.record.step_recorder import GradientFacts, StepRecorder
from torchmn.record.timeline import Coding, GpuClock, Mark


class ManualClock:
    is_host = True

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> Mark:
        return self.now

    def is_over(self, mark: Mark) -> bool:
        return True

    def seconds(self, begin: Mark, end: Mark) -> float:
        return float(end - begin)


class Optimizer:
    pass


class Comm:
    def __init__(self) -> None:
        self.sent = {"a": 0, "b": 0}

    def traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        return dict(self.sent), {}

    @property
    def num_sent_nbytes(self) -> int:
        return sum(self.sent.values())


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def lines() -> list[Line]:
    return []


@pytest.fixture
def recorder(clock: ManualClock, lines: list[Line]) -> StepRecorder:
    return StepRecorder(lines.append, clock)


def steps(lines: list[Line]) -> list[Step]:
    return [line for line in lines if isinstance(line, Step)]


def batch(recorder: StepRecorder, clock: ManualClock, seconds: float = 1.0) -> None:
    before = recorder.data_begins()
    clock.now += seconds
    recorder.data_ends(before)


def test_a_step_of_a_plain_loop(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    clock.now += 100  # imports and the model: no step
    batch(recorder, clock)
    clock.now += 2
    recorder.forward_begins(32, is_training=True)
    clock.now += 3
    assert recorder.backward_begins(torch.tensor(0.5))
    clock.now += 4
    waiting = recorder.enter("exchange", in_backward=True)
    clock.now += 5
    with Coding(recorder, "decode"):
        clock.now += 1
    recorder.leave(waiting)
    recorder.backward_ends()
    before = recorder.enter("optimizer")
    clock.now += 6
    recorder.leave(before)
    assert recorder.optimizer_stepped(Optimizer(), 7)
    (step,) = steps(lines)
    assert step.phases == {
        "data": 1.0,
        "other": 2.0,
        "forward": 3.0,
        "backward": 4.0,
        "exchange": 5.0,
        "decode": 1.0,
        "optimizer": 6.0,
    }
    assert step.seconds == sum(step.phases.values())
    assert (step.step, step.samples, step.at_s) == (7, 32, 100.0)
    (loss,) = (line for line in lines if isinstance(line, Value))
    assert (loss.name, loss.value, loss.step) == ("loss", 0.5, 7)


def test_what_comes_before_backward_is_forward_where_no_hook_sees_the_model(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    batch(recorder, clock)
    clock.now += 2
    recorder.backward_begins(None)
    clock.now += 3
    recorder.backward_ends()
    recorder.end_step(0)
    assert steps(lines)[0].phases == {"data": 1.0, "forward": 2.0, "backward": 3.0}


def test_batches_of_a_model_without_gradients_are_for_evaluation(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    recorder.forward_begins(8, is_training=True)
    recorder.end_step(0)
    for _ in range(2):
        batch(recorder, clock, 10)
        recorder.forward_begins(8, is_training=False)
        clock.now += 1
    batch(recorder, clock, 2)
    recorder.forward_begins(8, is_training=True)
    clock.now += 5
    recorder.end_step(1)
    assert steps(lines)[1].phases == {"evaluation": 22.0, "data": 2.0, "forward": 5.0}
    assert steps(lines)[1].samples == 8


def test_a_whole_phase_holds_what_is_done_in_it(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    recorder.forward_begins(None, is_training=True)
    before = recorder.enter_whole("checkpoint")
    clock.now += 1
    batch(recorder, clock)
    assert recorder.enter("exchange") is None
    inner = recorder.enter_whole("evaluation")
    clock.now += 1
    recorder.leave_whole(inner)
    clock.now += 1
    recorder.leave_whole(before)
    recorder.end_step(0)
    assert steps(lines)[0].phases == {"checkpoint": 4.0}


def test_the_optimizer_that_steps_most_often_ends_steps(
    recorder: StepRecorder, lines: list[Line]
) -> None:
    generator, critic = Optimizer(), Optimizer()
    assert recorder.optimizer_stepped(generator)
    assert not recorder.optimizer_stepped(critic)
    assert recorder.optimizer_stepped(generator)
    ended = [recorder.optimizer_stepped(critic) for _ in range(5)]
    assert ended == [False, False, True, True, True]
    assert not recorder.optimizer_stepped(generator)
    assert [step.step for step in steps(lines)] == [0, 1, 2, 3, 4]


def test_an_optimizer_follows_one_that_is_closed_or_gone(
    recorder: StepRecorder, lines: list[Line]
) -> None:
    first, second = Optimizer(), Optimizer()
    assert recorder.optimizer_stepped(first)
    recorder.optimizer_closed(first)
    assert recorder.optimizer_stepped(second)
    assert not recorder.optimizer_stepped(first)
    del second
    assert recorder.optimizer_stepped(first)


def test_calls_of_other_threads_change_no_phase(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    comm = Comm()
    recorder.follow(comm)
    recorder.forward_begins(None, is_training=True)
    found: list[object] = []

    def engine() -> None:
        exchange = recorder.exchange(comm, 3, 100, None)
        found.append(recorder.enter("exchange"))
        exchange.begin()
        comm.sent["b"] += 70
        clock.now += 2
        exchange.end()

    run_in_thread(engine)
    recorder.end_step(0)
    recorder.end_step(1)
    first, second = steps(lines)
    assert found == [None]
    assert first.phases == {"forward": 2.0}
    assert (first.sent, second.sent) == ({"b": 70}, {})
    (bucket,) = first.buckets
    assert (bucket.number, bucket.nbytes, bucket.sent_nbytes) == (3, 100, 70)
    assert (bucket.ready_s, bucket.started_s, bucket.ended_s) == (0.0, 0.0, 2.0)


def test_times_of_gradients_are_from_the_begin_of_backward(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    recorder.forward_begins(None, is_training=True)
    clock.now += 1
    recorder.backward_begins(None)
    for numel in (10, 20):
        clock.now += 1
        recorder.gradient_ready(GradientFacts(numel, 4 * numel, is_small=True))
    recorder.backward_ends()
    recorder.end_step(0)
    (times,) = (line for line in lines if isinstance(line, GradientTimes))
    assert (times.ready_s, times.numel, times.nbytes) == ([1.0, 2.0], [10, 20], [40, 80])


def test_a_very_long_step_keeps_no_list_of_its_phases(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    for _ in range(3000):
        batch(recorder, clock)
        clock.now += 1
    assert len(recorder._step.marks) < 5000
    recorder.end_step(0)
    assert steps(lines)[0].phases == {"data": 3000.0, "other": 3000.0}
    assert steps(lines)[0].seconds == 6000.0


class Stream:
    """A stand-in for a GPU: it passes events when a test lets it, a second after each other."""

    def __init__(self) -> None:
        self.num_events = 0
        self.num_passed = 0
        self.is_capturing = False

    def clock(self) -> GpuClock:
        return GpuClock(self.event, lambda: self.is_capturing)

    def event(self) -> StreamEvent:
        return StreamEvent(self)


class StreamEvent:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def record(self) -> None:
        self._stream.num_events += 1
        self.number = self._stream.num_events
        self._is_captured = self._stream.is_capturing

    def query(self) -> bool:
        assert not self._is_captured, "asked for an event of a CUDA graph"
        assert not self._stream.is_capturing, "asked for an event while a graph is captured"
        return self.number <= self._stream.num_passed

    def elapsed_time(self, end: StreamEvent) -> float:
        assert self.query(), "asked for a time before the GPU had passed it"
        assert end.query(), "asked for a time before the GPU had passed it"
        return 1e3 * (end.number - self.number)


def test_on_a_gpu_a_step_is_written_when_the_stream_has_passed_it(lines: list[Line]) -> None:
    """A stand-in for the GPU's events. `synchronize` is no method of it: calling it would fail."""
    stream = Stream()
    recorder = StepRecorder(lines.append, stream.clock())
    for number in range(3):
        recorder.forward_begins(4, is_training=True)
        recorder.backward_begins(None)
        exchange = recorder.exchange(Comm(), 0, 8, None)
        run_in_thread(lambda exchange=exchange: (exchange.begin(), exchange.end()))
        recorder.backward_ends()
        recorder.end_step(number)
    assert lines == []
    stream.num_passed = stream.num_events
    recorder.write_ended()
    written = steps(lines)
    assert [step.step for step in written] == [0, 1, 2]
    assert written[1].phases == {"forward": 1.0, "backward": 4.0, "other": 2.0}
    assert written[1].seconds == 7.0
    assert [len(step.buckets) for step in written] == [1, 1, 1]


def test_on_a_gpu_a_long_step_keeps_few_events(lines: list[Line]) -> None:
    """Those that the stream has passed are added up; one that is far behind keeps them."""
    stream = Stream()
    recorder = StepRecorder(lines.append, stream.clock())
    recorder.forward_begins(4, is_training=True)
    for number in range(20_000):
        recorder.leave(recorder.enter("evaluation"))
        stream.num_passed = stream.num_events if number > 5000 else 0
    assert len(recorder._step.marks) < 5000
    recorder.end_step(0)
    stream.num_passed = stream.num_events
    recorder.write_ended()
    [step] = steps(lines)
    assert sum(step.phases.values()) == step.seconds
    assert step.phases["evaluation"] == 20_000.0


def test_a_step_that_is_captured_as_a_graph_takes_no_event_of_it(
    lines: list[Line],
) -> None:
    stream = Stream()
    recorder = StepRecorder(lines.append, stream.clock())
    for number in range(3):
        stream.is_capturing = number == 1
        recorder.forward_begins(4, is_training=True)
        recorder.backward_begins(None)
        recorder.backward_ends()
        recorder.end_step(number)
    stream.num_passed = stream.num_events
    recorder.write_ended()
    assert [step.seconds for step in steps(lines)] == [4.0, 0.0, 4.0]


def test_settings_are_written_where_they_change(recorder: StepRecorder, lines: list[Line]) -> None:
    recorder.settings_are(0, {"codec": "float32", "schedule": "every_step"})
    recorder.settings_are(1, {"codec": "float32", "schedule": "every_step"})
    recorder.settings_are(5, {"codec": "1bit", "schedule": "every_step"})
    assert [(line.step, line.settings) for line in lines] == [
        (0, {"codec": "float32", "schedule": "every_step"}),
        (5, {"codec": "1bit"}),
    ]


def run_in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
