"""The server by itself, with pushes in a known order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.limits import limit
from torchmn.errors import PeerLostError, TimeLimitError
from torchmn.exchange.schedules.parameter_server.server import Reply, ShardServer
from torchmn.exchange.schedules.parameter_server.shards import ShardMemory

BEGIN = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


class Bench:
    """A server for one parameter; workers push on the calling thread."""

    def __init__(
        self,
        num_workers: int = 2,
        *,
        max_staleness: int = 10,
        lead: int = 0,
        delay_compensation: float = 0.0,
        timeout_s: float = 5.0,
        rate: float = 0.1,
    ) -> None:
        self.parameter = nn.Parameter(BEGIN.clone())
        self.named = [("w", self.parameter)]
        self.inner = torch.optim.SGD([self.parameter], rate)
        self.server = ShardServer(
            0,
            self.named,
            self.inner,
            num_workers,
            max_staleness=max_staleness,
            lead=lead,
            delay_compensation=delay_compensation,
            timeout_s=timeout_s,
        )
        self.clocks = [0] * num_workers
        self.signs = 0

    def begin(self, *others: int) -> None:
        """As if all had arrived, also those that a test does not push for."""
        self.server.open(0)
        for worker in others or range(len(self.clocks)):
            with self.server._changed:
                self.server._arrive(worker, 0)

    def push(self, worker: int, gradient: Tensor, **options: object) -> tuple[Tensor, Reply]:
        self.clocks[worker] += 1
        memory = ShardMemory(self.named)
        memory.slots["w"].copy_(gradient)
        reply = self.server.push(
            worker, episode=0, clock=self.clocks[worker], memory=memory, stay=self._stay,
            **options,  # type: ignore[arg-type]
        )  # fmt: skip
        return memory.slots["w"].clone(), reply

    def _stay(self) -> None:
        self.signs += 1


def test_each_push_is_an_update_and_its_staleness_is_counted() -> None:
    bench = Bench()
    bench.begin()
    g, h = torch.ones(3, dtype=torch.float64), torch.arange(3, dtype=torch.float64)
    pulled, first = bench.push(0, g)
    assert torch.allclose(pulled, BEGIN - 0.1 * g)
    pulled, second = bench.push(0, h)
    assert torch.allclose(pulled, BEGIN - 0.1 * g - 0.1 * h)
    pulled, third = bench.push(1, g)
    assert torch.allclose(pulled, BEGIN - 0.2 * g - 0.1 * h)
    assert [r.num_updates_late for r in (first, second, third)] == [0, 0, 2]
    assert first.version < second.version < third.version
    assert [r.num_steps_ahead for r in (first, second, third)] == [1, 2, 0]


def test_with_a_pipeline_gradients_are_of_the_pull_before_the_last() -> None:
    bench = Bench(lead=1)
    bench.begin()
    g = torch.ones(3, dtype=torch.float64)
    assert [bench.push(0, g)[1].num_updates_late for _ in range(4)] == [0, 1, 1, 1]


@pytest.mark.parametrize("lead", [0, 1])
def test_delay_compensation(lead: int) -> None:
    bench = Bench(lead=lead, delay_compensation=0.5)
    bench.begin()
    pulled = {0: [BEGIN] * (1 + lead), 1: [BEGIN] * (1 + lead)}
    value = BEGIN.clone()
    for number, worker in enumerate((0, 1, 1, 0, 1)):
        gradient = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64) * (number + 1)
        base = pulled[worker].pop(0)
        value = value - 0.1 * (gradient + 0.5 * gradient * gradient * (value - base))
        got, _ = bench.push(worker, gradient)
        assert torch.allclose(got, value, rtol=1e-14, atol=0)
        pulled[worker].append(got)


def test_every_worker_has_its_own_learning_rate() -> None:
    bench = Bench()
    bench.begin()
    g = torch.ones(3, dtype=torch.float64)
    bench.push(0, g, hyper=[{"lr": 0.5}])
    before, _ = bench.push(1, g, hyper=[{"lr": 0.0}])
    assert torch.allclose(before, BEGIN - 0.5)
    pulled, _ = bench.push(0, g, hyper=[{"lr": 0.5}])
    assert torch.allclose(pulled, BEGIN - 0.5 - 0.5)
    after, _ = bench.push(1, g, hyper=[{"lr": 0.0}])
    assert torch.equal(after, pulled)


def test_an_absent_gradient_is_no_zero() -> None:
    bench = Bench()
    bench.inner.param_groups[0]["weight_decay"] = 0.1
    bench.server._optimizer.param_groups[0]["weight_decay"] = 0.1
    bench.begin()
    zero = torch.zeros(3, dtype=torch.float64)
    pulled, _ = bench.push(0, zero, absent=frozenset({"w"}))
    assert torch.equal(pulled, BEGIN)
    pulled, _ = bench.push(0, zero)
    assert not torch.equal(pulled, BEGIN)


def test_a_step_without_gradient_counts_as_a_step() -> None:
    bench = Bench(max_staleness=1)
    bench.begin()
    pulled, _ = bench.push(0, torch.ones(3), has_gradients=False)
    assert torch.equal(pulled, BEGIN)
    bench.push(1, torch.ones(3))
    bench.push(0, torch.ones(3))  # would wait forever if the first were not counted


def run_aside(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    outcome: list[object] = []

    def main() -> None:
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    return thread, outcome


def test_a_worker_ahead_waits_for_the_slowest_live_worker() -> None:
    bench = Bench(num_workers=3, max_staleness=1)
    bench.begin()
    g = torch.ones(3, dtype=torch.float64)
    bench.push(0, g)
    thread, outcome = run_aside(lambda: bench.push(0, g))
    bench.push(1, g)
    thread.join(0.1)
    assert thread.is_alive()  # worker 2 has made no step
    bench.server.leave(2, "the cable is cut")
    thread.join(limit(5))
    [(_, reply)] = outcome  # type: ignore[misc]
    assert reply.num_steps_ahead == 1
    assert reply.lost == (2,)
    assert bench.server.lost == {2: "the cable is cut"}


def test_a_worker_that_is_done_does_not_delay_others() -> None:
    bench = Bench(max_staleness=0)
    bench.begin()
    thread, outcome = run_aside(
        lambda: bench.server.finish(1, 0, ShardMemory(bench.named), {}, bench._stay)
    )
    while bench.server._done[1] < 0:
        time.sleep(0.001)
    for _ in range(3):
        pulled, reply = bench.push(0, torch.ones(3))
    memory = ShardMemory(bench.named)
    last = bench.server.finish(0, 0, memory, {}, bench._stay)
    thread.join(limit(5))
    assert torch.equal(memory.slots["w"], pulled)
    assert outcome[0].version == last.version == reply.version  # type: ignore[attr-defined]


def test_a_wait_without_progress_ends_and_names_the_rank() -> None:
    bench = Bench(max_staleness=0, timeout_s=0.2)
    bench.begin()
    began = time.monotonic()
    with pytest.raises(TimeLimitError, match=r"0\.2 s \(.*rank 1 has made 0 steps"):
        bench.push(0, torch.ones(3))
    assert time.monotonic() - began > 0.2
    assert bench.signs >= 2


def test_notify_of_others_prolong_the_wait() -> None:
    bench = Bench(num_workers=3, max_staleness=3, timeout_s=0.4)
    bench.begin()
    for _ in range(3):
        bench.push(0, torch.ones(3))
    thread, outcome = run_aside(lambda: bench.push(0, torch.ones(3)))
    for _ in range(3):
        time.sleep(0.25)
        bench.push(1, torch.ones(3))
    bench.push(2, torch.ones(3))
    thread.join(limit(5))
    assert isinstance(outcome[0], tuple), outcome


def test_it_begins_when_all_have_arrived_with_the_values_of_its_rank() -> None:
    bench = Bench()
    thread, outcome = run_aside(lambda: bench.push(0, torch.zeros(3)))
    bench.begin(0)
    thread.join(0.1)
    assert thread.is_alive()
    with torch.no_grad():
        bench.parameter.fill_(7)
    bench.begin(1)
    thread.join(limit(5))
    pulled, _ = outcome[0]  # type: ignore[misc]
    assert torch.equal(pulled, torch.full((3,), 7.0, dtype=torch.float64))


def test_a_closed_server_reports_it() -> None:
    bench = Bench(max_staleness=0)
    bench.begin()
    thread, outcome = run_aside(lambda: bench.push(0, torch.ones(3)))
    time.sleep(0.02)
    bench.server.close("The end.")
    thread.join(limit(5))
    assert isinstance(outcome[0], PeerLostError)
    with pytest.raises(PeerLostError, match=r"The end\. Its part"):
        bench.push(1, torch.ones(3))


def test_one_closed_after_a_time_limit_names_the_missing_rank() -> None:
    """Later requests get the cause, not that the server is gone."""
    bench = Bench(max_staleness=0, timeout_s=0.1)
    bench.begin()
    with pytest.raises(TimeLimitError, match="rank 1 has made 0 steps"):
        bench.push(0, torch.ones(3))
    bench.server.close("The end.")
    with pytest.raises(TimeLimitError, match="rank 1 has made 0 steps"):
        bench.push(0, torch.ones(3))


def test_one_that_leaves_in_the_middle_is_lost_and_one_at_the_end_is_not() -> None:
    bench = Bench(num_workers=3)
    bench.begin()
    bench.server.leave(1)
    assert list(bench.server.lost) == [1]
    thread, _ = run_aside(
        lambda: bench.server.finish(2, 0, ShardMemory(bench.named), {}, bench._stay)
    )
    bench.server.finish(0, 0, ShardMemory(bench.named), {}, bench._stay)
    thread.join(limit(5))
    bench.server.leave(2)
    assert list(bench.server.lost) == [1]
