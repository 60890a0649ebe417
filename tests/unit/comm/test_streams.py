"""The order of the exchange's work with that of a device, proven on a fake one.

Each contract fails for the twin of the engine or of the streams that leaves one wait out.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from tests.limits import limit
from tests.unit.comm.fake_device import FakeDevice, FakeNccl, FakeStreams, HostWaits, Meeting
from torchmn.comm.engine import Engine
from torchmn.comm.flight_recorder import FlightRecorder
from torchmn.comm.group import Group
from torchmn.comm.streams import Deferred, Event, HostStreams, streams_of
from torchmn.comm.watcher import Held
from torchmn.errors import CommunicationError, PeerLostError, TimeLimitError, UnsupportedError

CPU = torch.device("cpu")
NUM_STEPS = 4


class Bench:
    """A rank with a fake device, an engine and a group of ranks."""

    def __init__(
        self,
        order: str,
        streams: type[FakeStreams] = FakeStreams,
        meeting: Meeting | None = None,
        rank: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        self.device = FakeDevice(order)
        self.streams = streams(self.device)
        self.engine = Engine(CPU, has_peers=True, streams=self.streams)
        self.recorder = FlightRecorder()
        self.transport = FakeNccl(meeting or Meeting(1), rank, self.streams)
        self.group = Group(
            "world",
            self.transport,
            flight_recorder=self.recorder,
            engine=self.engine,
            timeout_s=timeout_s,
            first_timeout_s=timeout_s,
            rank_label=f"rank {rank}",
        )

    def close(self) -> None:
        self.device.begin()
        try:
            self.engine.close()
        finally:
            self.device.close()


@pytest.fixture(params=["caller first", "exchange first"])
def order(request) -> str:
    return request.param


def value_of(x: Tensor, bench: Bench) -> list[float]:
    """What the caller's stream reads in a tensor, after all was done."""
    return numbers_of([bench.streams.fetch(x)], bench)[0]


def numbers_of(arriving: list[Deferred], bench: Bench) -> list[list[float]]:
    """What arrives, of a device that begins when the host has to wait for it, and not before."""
    numbers = []
    for each in arriving:
        if not each.ready():
            bench.device.begin()
        numbers.append(each.get().tolist())
    return numbers


# ---- contracts, each with the twin for which it fails ----


def jobs_see_what_was_queued_before_them(bench: Bench) -> bool:
    x = bench.device.tensor(torch.zeros(2))
    seen = []
    for number in range(NUM_STEPS):
        x.fill_(float(number))
        seen.append(bench.engine.submit(lambda: x * 2))
        seen[-1].wait()
    return all(value_of(seen[i].wait(), bench) == [2.0 * i] * 2 for i in range(NUM_STEPS))


def jobs_see_what_other_streams_have_written(bench: Bench) -> bool:
    x = bench.device.tensor(torch.zeros(2))
    made = bench.streams.record()
    with bench.device.on("side"):
        bench.streams.wait(made)
        x.fill_(3.0)
        written = bench.streams.record()
    return value_of(bench.engine.submit(lambda: x + 1, after=[written]).wait(), bench) == [4.0, 4.0]


def callers_see_the_results(bench: Bench) -> bool:
    x = bench.device.tensor(torch.zeros(2))
    found = []
    for number in range(NUM_STEPS):
        x.fill_(float(number))
        works = [bench.engine.submit(lambda: x.add_(1)) for _ in range(2)]
        for work in works:
            work.wait()
        found.append(bench.streams.fetch(x))
    return numbers_of(found, bench) == [[i + 2.0] * 2 for i in range(NUM_STEPS)]


def a_buffer_is_not_filled_again_while_it_is_read(bench: Bench) -> bool:
    """As a bucket, which the next backward pass fills."""
    bucket = bench.device.tensor(torch.zeros(2))
    sums = bench.device.tensor(torch.zeros(2))
    for number in range(1, NUM_STEPS + 1):
        bucket.fill_(float(number))
        bench.engine.submit(lambda: sums.add_(bucket)).wait()
    return value_of(sums, bench) == [10.0, 10.0]


def memory_of_a_job_is_kept_until_the_device_has_used_it(bench: Bench) -> bool:
    total = bench.device.tensor(torch.zeros(2))
    for _ in range(NUM_STEPS):
        parts = [bench.device.tensor(torch.ones(2))]
        work = bench.engine.submit(lambda parts=parts: total.add_(parts[0]))
        del parts
        assert work.is_done_within(limit(10))
        gc.collect()
    work.wait()
    return value_of(total, bench) == [NUM_STEPS] * 2


def memory_of_a_result_is_kept_until_the_caller_has_used_it(bench: Bench) -> bool:
    x = bench.device.tensor(torch.ones(2))
    total = bench.device.tensor(torch.zeros(2))
    for _ in range(NUM_STEPS):
        result = bench.engine.submit(lambda: {"sums": [x * 2]}).wait()
        total.add_(result["sums"][0])
        del result
        gc.collect()
    return value_of(total, bench) == [2.0 * NUM_STEPS] * 2


def numbers_are_read_when_they_have_arrived(bench: Bench) -> bool:
    footer = bench.device.tensor(torch.zeros(3))
    arrived: list[Deferred] = []
    for number in range(NUM_STEPS):
        bench.streams.send(torch.full((3,), float(number)), footer)
        bench.engine.call(lambda: arrived.append(bench.engine.fetch(footer[:2])))
    return numbers_of(arrived, bench) == [[float(i)] * 2 for i in range(NUM_STEPS)]


class NoWaitOfJobs(FakeStreams):
    def wait(self, event: Event | None) -> None:
        if self.device.current != "exchange":
            super().wait(event)


class OneWaitOfJobs(FakeStreams):
    """Waits for the caller's stream, and not for the others."""

    has_waited = False

    def wait(self, event: Event | None) -> None:
        if self.device.current != "exchange" or not self.has_waited:
            self.has_waited = event is not None
            super().wait(event)


class NoWaitOfCallers(FakeStreams):
    def wait(self, event: Event | None) -> None:
        if self.device.current == "exchange":
            super().wait(event)


class KeepsNoResults(FakeStreams):
    def keep(self, tensor: Tensor) -> None:
        return


class ReusesPinnedMemoryAtOnce(FakeStreams):
    def give_back(self, host: Tensor, event: Event) -> None:
        event.is_over = True
        super().give_back(host, event)


class ReadsTooEarly(FakeStreams):
    def fetch(self, values, check=lambda: None) -> Deferred:
        deferred = super().fetch(values, check)
        deferred.ready = lambda: True
        return deferred


CONTRACTS: dict[Callable[[Bench], bool], list[type[FakeStreams]]] = {
    jobs_see_what_was_queued_before_them: [NoWaitOfJobs],
    jobs_see_what_other_streams_have_written: [NoWaitOfJobs, OneWaitOfJobs],
    callers_see_the_results: [NoWaitOfCallers, ReadsTooEarly],
    a_buffer_is_not_filled_again_while_it_is_read: [NoWaitOfCallers],
    memory_of_a_job_is_kept_until_the_device_has_used_it: [],
    memory_of_a_result_is_kept_until_the_caller_has_used_it: [KeepsNoResults],
    numbers_are_read_when_they_have_arrived: [ReusesPinnedMemoryAtOnce, ReadsTooEarly],
}


def holds(contract: Callable[[Bench], bool], order: str, streams: type[FakeStreams]) -> bool:
    bench = Bench(order, streams)
    try:
        with bench.device.running():
            return contract(bench)
    finally:
        bench.close()


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda each: each.__name__)
def test_contract(contract: Callable[[Bench], bool], order: str) -> None:
    assert holds(contract, order, FakeStreams)


@pytest.mark.parametrize(
    ("contract", "broken"),
    [(contract, twin) for contract, twins in CONTRACTS.items() for twin in twins],
    ids=lambda each: each.__name__,
)
def test_a_missing_wait_is_found(contract, broken) -> None:
    assert not all(holds(contract, order, broken) for order in ("caller first", "exchange first"))


def test_memory_of_a_job_that_is_not_kept_is_found(monkeypatch) -> None:
    monkeypatch.setattr(
        Held, "__init__", lambda self, event, *objects: setattr(self, "_event", event)
    )
    contract = memory_of_a_job_is_kept_until_the_device_has_used_it
    assert not holds(contract, "caller first", FakeStreams)


# ---- the host ----


def test_the_host_reads_no_number_of_the_device(order: str) -> None:
    bench = Bench(order)
    with bench.device.running():
        x = bench.device.tensor(torch.ones(2))
        host = torch.empty(2)
        for read in (x.sum().item, lambda: bool(x.any()), lambda: host.copy_(x)):
            with pytest.raises(HostWaits):
                read()
    bench.close()


def test_sums_are_queued_one_behind_the_other(order: str) -> None:
    """The host has queued all of them before the device has begun the first."""
    meeting, size = Meeting(2), 2
    results: dict[int, list[list[float]]] = {}

    def rank_(rank: int) -> None:
        bench = Bench(order, meeting=meeting, rank=rank)
        with bench.device.running():
            buckets = [bench.device.tensor(torch.full((2,), float(i + rank))) for i in range(3)]
            works = [bench.engine.submit(lambda b=b: bench.group.all_reduce_(b)) for b in buckets]
            assert all(work.is_done_within(limit(10)) for work in works)
            states = [entry.state for entry in bench.recorder.entries()]
            bench.device.begin()
            for work in works:
                work.wait()
            results[rank] = [value_of(bucket, bench) for bucket in buckets]
        bench.close()
        assert states == ["running"] * 3
        assert [entry.state for entry in bench.recorder.entries()] == ["done"] * 3

    ranks = [threading.Thread(target=rank_, args=(rank,)) for rank in range(size)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(limit(30))
    assert results == {rank: [[2.0 * i + 1] * 2 for i in range(3)] for rank in range(size)}


@pytest.mark.parametrize("how", ["call", "submit", "wait", "get", "close"])
def test_a_late_sum_is_raised_once_by_what_comes_next(how: str) -> None:
    bench = Bench("caller first", meeting=Meeting(2), timeout_s=0.3)
    engine, group = bench.engine, bench.group
    with bench.device.running():
        x = bench.device.tensor(torch.ones(2))
        engine.submit(lambda: group.all_reduce_(x)).wait()
        second = engine.submit(lambda: group.all_reduce_(x))
        deferred = engine.fetch(x)
        bench.device.begin()
        until = time.monotonic() + limit(20)
        while bench.recorder.entries()[0].state == "running" and time.monotonic() < until:
            time.sleep(0.01)
        after = {
            "call": lambda: engine.call(lambda: None),
            "submit": lambda: engine.submit(lambda: None),
            "wait": second.wait,
            "get": deferred.get,
            "close": engine.close,
        }[how]
        time.sleep(0.05)
        with pytest.raises(TimeLimitError, match=r"rank 0: all_reduce #1 of group 'world'"):
            after()
        for later in (deferred.get, second.wait, *([] if how == "close" else [engine.close])):
            with pytest.raises(CommunicationError, match="cannot be used after an exchange failed"):
                engine.call(lambda: None) if later == engine.close else later()
    bench.close()  # waits for the watcher, which ends the second one after it has told of the first
    assert [entry.state for entry in bench.recorder.entries()] == ["late", "failed"]
    assert bench.recorder.overdue() is bench.recorder.entries()[0]


def numbers_behind_a_lost_peer(*, fails_after_reading: bool = False) -> list[float]:
    bench = Bench("caller first", meeting=Meeting(2))
    if fails_after_reading:
        bench.transport.may_fail.clear()
    with bench.device.running():
        x = bench.device.tensor(torch.ones(2))
        work = bench.engine.submit(lambda: bench.group.all_reduce_(x))
        assert work.is_done_within(limit(10))
        deferred = bench.engine.call(lambda: bench.engine.fetch(x))
        bench.device.begin()
        bench.transport.is_lost = True
        try:
            return deferred.get().tolist()
        finally:
            bench.transport.may_fail.set()
            with suppress(CommunicationError):
                bench.close()


def test_a_lost_peer_is_raised_in_place_of_numbers_that_mean_nothing() -> None:
    with pytest.raises(PeerLostError, match="all_reduce #1"):
        numbers_behind_a_lost_peer()


def test_numbers_of_an_aborted_sum_are_found_where_the_engine_is_told_too_late(monkeypatch) -> None:
    monkeypatch.setattr(Engine, "begin_to_fail", lambda self: None)
    assert numbers_behind_a_lost_peer(fails_after_reading=True) == [1.0, 1.0]  # not the sum


def test_a_time_limit_counts_from_the_end_of_the_collective_before() -> None:
    """Both together take longer than the limit of each."""
    bench = Bench("caller first", meeting=Meeting(1), timeout_s=limit(0.6))
    gates = [threading.Event(), threading.Event()]
    works = []
    with bench.device.running():
        x = bench.device.tensor(torch.ones(2))
        for gate in gates:
            with bench.streams.exchanging():
                bench.device.queue(gate.is_set)
            works.append(bench.engine.submit(lambda: bench.group.all_reduce_(x)))
            assert works[-1].is_done_within(limit(10))
        bench.device.begin()
        for gate in gates:
            time.sleep(limit(0.35))
            gate.set()
        for work in works:
            work.wait()
    bench.close()
    assert [entry.state for entry in bench.recorder.entries()] == ["done"] * 2


def test_a_graph_is_refused_before_anything_is_started() -> None:
    bench = Bench("caller first")
    bench.streams.is_in_capture = True
    for start in (bench.engine.call, bench.engine.submit):
        with pytest.raises(UnsupportedError, match="A CUDA graph is being captured"):
            start(lambda: pytest.fail("it was started"))
    bench.streams.is_in_capture = False
    assert bench.engine.call(lambda: 1) == 1
    bench.close()


# ---- the CPU ----


def test_on_the_cpu_nothing_is_deferred() -> None:
    streams = streams_of(CPU)
    assert isinstance(streams, HostStreams)
    assert streams.record() is None
    x = torch.ones(2)
    deferred = streams.fetch(x)
    x.zero_()
    assert deferred.ready()
    assert deferred.get().tolist() == [1.0, 1.0]
    streams.send(torch.tensor([3.0, 4.0]), x)
    assert x.tolist() == [3.0, 4.0]
