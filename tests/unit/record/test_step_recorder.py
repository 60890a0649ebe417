"""What the recorder makes of its calls, on a clock that tests move."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from torchmn.base.events import Gradient
from torchmn.record.records import GradientTimes, Line, Step
from torchmn.record.step_recorder import StepRecorder
from torchmn.record.timeline import GpuClock, Mark


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


class Block:
    buffer = torch.zeros(25)


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
    recorder.phase("data", True)
    clock.now += seconds
    recorder.phase("data", False)


def backward(ready: Callable[[], object]) -> None:
    """A pass of autograd, in which ``ready`` is called for the only gradient."""

    def hook(_: torch.Tensor) -> None:
        ready()

    x = torch.ones(1, requires_grad=True)
    x.register_post_accumulate_grad_hook(hook)
    x.sum().backward()


def stepped(recorder: StepRecorder, optimizer: object, number: int = 0) -> None:
    recorder.step_begins(optimizer)
    recorder.step_ended(optimizer, number)


def test_a_step_of_a_plain_loop(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    clock.now += 100  # imports and the model: no step
    batch(recorder, clock)
    clock.now += 2
    recorder.forward(32, is_training=True)
    clock.now += 3

    def gradient_is_ready() -> None:
        recorder.phase("backward", True)
        clock.now += 4
        recorder.phase("pack", True)
        clock.now += 5
        recorder.phase("decode", True)
        clock.now += 1
        recorder.phase("decode", False)
        recorder.phase("pack", False)

    backward(gradient_is_ready)
    optimizer = Optimizer()
    recorder.step_begins(optimizer)
    clock.now += 6
    recorder.step_ended(optimizer, 7)
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


def test_what_lies_between_a_step_and_forward_is_data_where_no_loader_tells(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    recorder.forward(8, is_training=True)
    optimizer = Optimizer()
    for number in range(2):
        clock.now += 1
        backward(lambda: [recorder.phase("pack", begins) for begins in (True, False)])
        clock.now += 1  # clipping, say
        stepped(recorder, optimizer, number)
        clock.now += 2
        recorder.forward(8, is_training=True)
    assert steps(lines)[1].phases == {"data": 2.0, "forward": 1.0, "other": 1.0}


def test_a_backward_pass_that_exchanges_nothing_ends_too(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    recorder.forward(8, is_training=True)
    for _ in range(2):  # accumulated, under no_sync()
        clock.now += 1

        def computed() -> None:
            recorder.phase("backward", True)
            clock.now += 3

        backward(computed)
        clock.now += 5
        recorder.forward(8, is_training=True)
    recorder.end_step(0)
    assert steps(lines)[0].phases == {"forward": 2.0, "backward": 6.0, "data": 10.0}


def test_a_part_that_raised_ends_with_what_it_is_in(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    recorder.forward(8, is_training=True)
    recorder.phase("exchange", True)
    recorder.phase("encode", True)
    clock.now += 1
    recorder.phase("exchange", False)
    clock.now += 1
    recorder.phase("encode", False)  # nothing that has begun
    recorder.end_step(0)
    assert steps(lines)[0].phases == {"encode": 1.0, "forward": 1.0}


def test_batches_of_a_model_without_gradients_are_for_evaluation(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    recorder.forward(8, is_training=True)
    recorder.end_step(0)
    for _ in range(2):
        batch(recorder, clock, 10)
        recorder.forward(8, is_training=False)
        clock.now += 1
    batch(recorder, clock, 2)
    recorder.forward(8, is_training=True)
    clock.now += 5
    recorder.end_step(1)
    assert steps(lines)[1].phases == {"evaluation": 22.0, "data": 2.0, "forward": 5.0}
    assert steps(lines)[1].samples == 8


def test_a_whole_phase_holds_what_is_done_in_it(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    recorder.forward(None, is_training=True)
    recorder.phase("checkpoint", True)
    clock.now += 1
    batch(recorder, clock)
    recorder.phase("exchange", True)
    recorder.phase("evaluation", True)
    clock.now += 1
    recorder.phase("evaluation", False)
    recorder.phase("exchange", False)
    clock.now += 1
    recorder.phase("checkpoint", False)
    recorder.end_step(0)
    assert steps(lines)[0].phases == {"checkpoint": 4.0}


def test_the_optimizer_that_steps_most_often_ends_steps(
    recorder: StepRecorder, lines: list[Line]
) -> None:
    generator, critic = Optimizer(), Optimizer()
    ended = []
    for optimizer in (generator, critic, generator, *[critic] * 5, generator):
        before = len(lines)
        stepped(recorder, optimizer, len(ended))
        ended.append(len(lines) > before)
    assert ended == [True, False, True, False, False, True, True, True, False]


def test_an_optimizer_follows_one_that_is_closed_or_gone(
    recorder: StepRecorder, lines: list[Line]
) -> None:
    first, second = Optimizer(), Optimizer()
    stepped(recorder, first, 0)
    recorder.optimizer_closed(first)
    stepped(recorder, second, 1)
    stepped(recorder, first, 2)
    del second
    stepped(recorder, first, 3)
    assert [step.step for step in steps(lines)] == [0, 1, 3]


def test_a_step_inside_of_another_one_and_one_that_raises(
    recorder: StepRecorder, lines: list[Line]
) -> None:
    outer, inner = Optimizer(), Optimizer()
    recorder.step_begins(outer)
    stepped(recorder, inner, 10)
    recorder.step_ended(outer, 0)
    recorder.step_begins(outer)
    recorder.step_ended(outer, None)
    recorder.step_begins(inner)  # raises, and torch calls no hook at its end
    stepped(recorder, inner, 1)
    assert [step.step for step in steps(lines)] == [0]
    stepped(recorder, outer, 1)
    assert [step.step for step in steps(lines)] == [0, 1]


def test_calls_of_other_threads_change_no_phase(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    comm = Comm()
    recorder.communicator(comm, True)
    recorder.forward(None, is_training=True)

    def engine() -> None:
        recorder.exchange(comm, Block, 3, "queued")
        recorder.phase("exchange", True)
        recorder.exchange(comm, Block, 3, "started")
        comm.sent["b"] += 70
        clock.now += 2
        recorder.exchange(comm, Block, 3, "ended")

    run_in_thread(engine)
    recorder.end_step(0)
    recorder.end_step(1)
    first, second = steps(lines)
    assert first.phases == {"forward": 2.0}
    assert (first.sent, second.sent) == ({"b": 70}, {})
    (bucket,) = first.buckets
    assert (bucket.number, bucket.nbytes, bucket.sent_nbytes) == (3, 100, 70)
    assert (bucket.ready_s, bucket.started_s, bucket.ended_s) == (0.0, 0.0, 2.0)


def test_times_of_gradients_are_from_the_first_one(
    recorder: StepRecorder, clock: ManualClock, lines: list[Line]
) -> None:
    recorder.forward(None, is_training=True)
    clock.now += 1

    def gradients_are_ready() -> None:
        for numel in (10, 20):
            recorder.gradient(Gradient(numel, 4 * numel, is_small=True))
            clock.now += 1

    backward(gradients_are_ready)
    recorder.end_step(0)
    (times,) = (line for line in lines if isinstance(line, GradientTimes))
    assert (times.ready_s, times.numel, times.nbytes) == ([0.0, 1.0], [10, 20], [40, 80])


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
        recorder.forward(4, is_training=True)
        backward(lambda: recorder.phase("backward", True))
        recorder.exchange(Comm(), Block, 0, "ready")
        recorder.exchange(Comm(), Block, 0, "queued")
        for stage in ("started", "ended"):
            run_in_thread(lambda stage=stage: recorder.exchange(Comm(), Block, 0, stage))
        recorder.end_step(number)
    assert lines == []
    stream.num_passed = stream.num_events
    recorder.write_ended()
    written = steps(lines)
    assert [step.step for step in written] == [0, 1, 2]
    assert written[1].phases == {"data": 1.0, "forward": 1.0, "backward": 1.0, "other": 4.0}
    assert written[1].seconds == 7.0
    assert [len(step.buckets) for step in written] == [1, 1, 1]


def test_on_a_gpu_autograds_thread_is_the_one_that_trains(lines: list[Line]) -> None:
    """It calls the hooks of a pass, and then what ends the pass: there the exchange is awaited."""
    stream = Stream()
    recorder = StepRecorder(lines.append, stream.clock())

    def exchange() -> None:
        recorder.phase("exchange", True)
        recorder.phase("exchange", False)

    def autograd() -> None:
        exchange()  # this thread has not been one of autograd's yet
        backward(lambda: recorder.phase("backward", True))
        exchange()
        run_in_thread(exchange)  # of an engine, while autograd's thread lives, as it always does

    recorder.forward(4, is_training=True)
    run_in_thread(autograd)
    recorder.end_step(0)
    stream.num_passed = stream.num_events
    recorder.write_ended()
    assert steps(lines)[0].phases["exchange"] == 1.0


def test_on_a_gpu_the_times_of_a_codec_are_those_of_the_stream(lines: list[Line]) -> None:
    stream = Stream()
    recorder = StepRecorder(lines.append, stream.clock())

    def exchange() -> None:
        recorder.exchange(Comm(), Block, 0, "started")
        for name, num_events in (("encode", 2), ("decode", 1), ("encode", 4)):
            recorder.phase(name, True)
            for _ in range(num_events - 1):
                stream.event().record()
            recorder.phase(name, False)
        recorder.exchange(Comm(), Block, 0, "ended")

    recorder.exchange(Comm(), Block, 0, "queued")
    run_in_thread(exchange)
    recorder.end_step(0)
    stream.num_passed = stream.num_events
    recorder.write_ended()
    [bucket] = steps(lines)[0].buckets
    assert (bucket.encode_s, bucket.decode_s) == (6.0, 1.0)
    assert bucket.ended_s - bucket.started_s == 11.0


def test_on_a_gpu_a_long_step_keeps_few_events(lines: list[Line]) -> None:
    """Those that the stream has passed are added up; one that is far behind keeps them."""
    stream = Stream()
    recorder = StepRecorder(lines.append, stream.clock())
    recorder.forward(4, is_training=True)
    for number in range(20_000):
        recorder.phase("evaluation", True)
        recorder.phase("evaluation", False)
        stream.num_passed = stream.num_events if number > 5000 else 0
    assert len(recorder._step.marks) < 5000
    recorder.end_step(0)
    stream.num_passed = stream.num_events
    recorder.write_ended()
    [step] = steps(lines)
    assert sum(step.phases.values()) == step.seconds
    assert step.phases["evaluation"] == 20_000.0


def test_a_step_that_is_captured_as_a_graph_takes_no_event_of_it(lines: list[Line]) -> None:
    stream = Stream()
    recorder = StepRecorder(lines.append, stream.clock())
    for number in range(3):
        stream.is_capturing = number == 1
        recorder.forward(4, is_training=True)
        backward(lambda: recorder.phase("backward", True))
        recorder.end_step(number)
    stream.num_passed = stream.num_events
    recorder.write_ended()
    assert [step.seconds for step in steps(lines)] == [4.0, 0.0, 4.0]


def test_settings_are_written_where_they_change(recorder: StepRecorder, lines: list[Line]) -> None:
    recorder.settings(0, {"codec": "float32", "schedule": "every_step"})
    recorder.settings(1, {"codec": "float32", "schedule": "every_step"})
    recorder.settings(5, {"codec": "1bit", "schedule": "every_step"})
    assert [(line.step, line.settings) for line in lines] == [
        (0, {"codec": "float32", "schedule": "every_step"}),
        (5, {"codec": "1bit"}),
    ]


def run_in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
