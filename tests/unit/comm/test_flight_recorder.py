"""The record of collectives."""

from __future__ import annotations

import threading

import torch

from tests.contracts.suites.communicator_contracts import network, sgd, step, training_data
from torchmn import create_multi_node_optimizer
from torchmn.comm.flight_recorder import FlightRecorder
from torchmn.testing import run_ranks


def test_numbers_states_and_labels() -> None:
    flight_recorder = FlightRecorder()
    assert flight_recorder.last is None
    first = flight_recorder.begin("world", "all_reduce", (3,), "float32")
    assert first.state == "running"
    assert first.ended_s is None
    flight_recorder.end(first, "done")
    flight_recorder.set_label(2, 7)
    second = flight_recorder.begin("node", "reduce", (4, 5), "float64")
    third = flight_recorder.begin("node", "broadcast", (), "-")
    flight_recorder.set_label(None, None)
    flight_recorder.end(second, "failed")
    fourth = flight_recorder.begin("world", "barrier", (), "-")
    assert flight_recorder.last is fourth
    assert [e.number for e in flight_recorder.entries()] == [1, 2, 3, 4]
    assert [e.state for e in flight_recorder.entries()] == ["done", "failed", *["running"] * 2]
    labels = [(e.bucket, e.step) for e in flight_recorder.entries()]
    assert labels == [(None, None), (2, 7), (2, 7), (None, None)]
    assert first.ended_s >= first.started_s
    assert str(first) == "all_reduce #1 of group 'world' (shape (3,), float32)"
    assert str(second) == "reduce #2 of group 'node' (bucket 2, step 7, shape (4, 5), float64)"
    assert third.shape == ()


def test_keeps_the_last_ones() -> None:
    flight_recorder = FlightRecorder(capacity=3)
    for _ in range(10):
        flight_recorder.end(flight_recorder.begin("world", "barrier", (), "-"), "done")
    assert [e.number for e in flight_recorder.entries()] == [8, 9, 10]


def test_overdue_is_what_has_not_completed_in_time() -> None:
    flight_recorder = FlightRecorder(job_ranks=[0, 1])
    flight_recorder.end(flight_recorder.begin("world", "barrier", (), "-", 0.0), "done")
    assert flight_recorder.overdue() is None
    flight_recorder.end(
        flight_recorder.begin("world", "barrier", (), "-", 100.0), "failed"
    )  # a peer was lost
    assert flight_recorder.overdue() is None
    late = flight_recorder.begin("world", "barrier", (), "-", 0.0)
    assert flight_recorder.overdue() is late
    flight_recorder.end(late, "late")
    assert flight_recorder.overdue() is late


def test_a_description_has_the_ranks_of_the_job() -> None:
    flight_recorder = FlightRecorder(job_ranks=[4, 6, 7])
    flight_recorder.register_group("leaders", [0, 2])
    for _ in range(2):
        flight_recorder.end(flight_recorder.begin("leaders", "all_reduce", (3,), "float32"), "done")
    flight_recorder.set_label(1, 9)
    flight_recorder.begin("world", "gather", (5,), "uint8")
    leaders, world = flight_recorder.describe()
    assert leaders.ranks == (4, 7)
    assert leaders.number == 2
    assert leaders.what == "all_reduce of float32[3]"
    assert leaders.state == "done"
    assert world.ranks == (4, 6, 7)
    assert world.what == "gather"  # ranks may have different shapes
    assert world.where == "bucket 1, step 9"


def test_ranks_keep_pace_from_the_first_exchange_of_gradients_on() -> None:
    def rank_main(comm):
        before = comm.world.limit_s
        comm.allreduce(torch.ones(2))
        still = comm.world.limit_s
        comm.engine.call(comm.route.sum_job(torch.ones(2), bucket=0, step=3))
        comm.engine.call(comm.route.sum_job(torch.ones(2), bucket=1, step=3))
        in_first = comm.world.limit_s
        comm.engine.call(comm.route.sum_job(torch.ones(2), bucket=0, step=4))
        return before, still, in_first, comm.world.limit_s

    def rank_main_with_limits(comm):
        comm.world.first_timeout_s = 50.0
        return rank_main(comm)

    assert run_ranks(rank_main_with_limits, 2, timeout_s=5) == [(50.0, 50.0, 50.0, 5.0)] * 2


def test_every_collective_of_every_group_is_recorded_in_order() -> None:
    inputs, targets = training_data(num_steps=2)

    def rank_main(comm):
        comm.route.bucket_bytes = 100
        model = network(0)
        optimizer = create_multi_node_optimizer(sgd(model), comm, model)
        num_before = comm.flight_recorder.last.number
        for x, y in zip(inputs, targets, strict=True):
            step(model, optimizer, x, y)
        comm.barrier()
        entries = [e for e in comm.flight_recorder.entries() if e.number > num_before]
        assert [e.number for e in entries] == list(range(num_before + 1, entries[-1].number + 1))
        assert all(e.state == "done" for e in entries)
        assert entries[-1].name == "barrier"
        assert entries[-1].bucket is None
        steps = [e.step for e in entries[:-1]]
        assert steps == sorted(steps)
        assert set(steps) == {0, 1}
        buckets = [e.bucket for e in entries if e.step == 0]
        assert buckets == sorted(buckets)
        assert len(set(buckets)) > 2
        assert {e.group for e in entries} >= {"node"}
        assert {e.dtype for e in entries[:-1]} == {"float64"}
        return [(e.name, e.bucket, e.step, e.shape) for e in entries]

    assert len(set(map(str, run_ranks(rank_main, 2, name="hierarchical")))) == 1


def test_another_thread_reads_while_collectives_run() -> None:
    def rank_main(comm):
        problems: list[str] = []
        is_over = threading.Event()
        num_reads = [0]

        def watch() -> None:
            last = 0
            while not num_reads[0] or not is_over.is_set():
                entries = comm.flight_recorder.entries()
                numbers = [e.number for e in entries]
                if numbers != sorted(numbers) or (numbers and numbers[-1] < last):
                    problems.append(f"out of order: {numbers[-5:]}")
                last = numbers[-1] if numbers else last
                if sum(e.state == "running" for e in entries) > 1:
                    problems.append("two collectives run at once")
                num_reads[0] += 1
                is_over.wait(0.0005)

        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(60):
            works = [comm.route.start_sum_(torch.ones(3)) for _ in range(3)]
            for work in works:
                work.wait()
        is_over.set()
        watcher.join()
        return problems

    assert run_ranks(rank_main, 2) == [[], []]


def test_a_group_of_the_whole_job_is_described_without_its_ranks() -> None:
    """Each of many ranks would send the list of all."""
    recorder = FlightRecorder(job_ranks=range(4), has_whole_job=True)
    recorder.register_group("node", (0, 1))
    for made in (recorder, recorder.for_other_thread()):
        made.begin("world", "barrier", (), "-")
    recorder.begin("node", "barrier", (), "-")
    assert [(each.group, each.ranks) for each in recorder.describe()] == [
        ("world", ()),
        ("node", (0, 1)),
    ]
    part = FlightRecorder(job_ranks=range(2))
    part.begin("world", "barrier", (), "-")
    assert part.describe()[0].ranks == (0, 1)
