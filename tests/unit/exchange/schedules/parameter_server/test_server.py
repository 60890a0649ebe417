"""The server by itself, with pushes in a known order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.limits import limit
from torchmn.errors import PeerLostError, TimeLimitError
from torchmn.exchange.schedules.parameter_server.server import _TRAINS, Reply, ShardServer, Update
from torchmn.exchange.schedules.parameter_server.shards import ShardMemory

BEGIN = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


class Bench:
    """A server for one parameter; workers push on the calling thread."""

    def __init__(
        self,
        num_workers: int = 2,
        *,
        max_staleness: int = 10,
        timeout_s: float = limit(5),
    ) -> None:
        self.parameter = nn.Parameter(BEGIN.clone())
        self.named = [("w", self.parameter)]
        self.inner = torch.optim.SGD([self.parameter], 0.1)
        self.server = ShardServer(
            0,
            self.named,
            self.inner,
            num_workers,
            max_staleness=max_staleness,
            timeout_s=timeout_s,
        )
        self.num_workers = num_workers
        self.signs = 0

    def begin(self, *others: int) -> None:
        """As if all had arrived, also those that a test does not push for."""
        for worker in others or range(self.num_workers):
            with self.server._changed:
                self.server._reach(worker, 0, _TRAINS)

    def push(
        self, worker: int, gradient: Tensor | None, absent: Sequence[str] = (), **options: float
    ) -> tuple[Tensor, Reply]:
        update = None
        if gradient is not None:
            memory = ShardMemory(self.named)
            memory.slots["w"].copy_(gradient)
            update = Update(gradients=memory.buffers, absent=[*absent], hyper=[options])
        fields = {"episode": 0, "update": update}
        reply = self.server.answer("push", worker, fields, self._stay)
        return self.pulled(reply), reply

    def finish(self, worker: int) -> Reply:
        reply: Reply = self.server.answer("finish", worker, {"episode": 0}, self._stay)
        return reply

    def pulled(self, reply: Reply) -> Tensor:
        memory = ShardMemory(self.named)
        memory.fill(reply.parameters)
        return memory.slots["w"]

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


def test_every_worker_has_its_own_learning_rate() -> None:
    bench = Bench()
    bench.begin()
    g = torch.ones(3, dtype=torch.float64)
    bench.push(0, g, lr=0.5)
    before, _ = bench.push(1, g, lr=0.0)
    assert torch.allclose(before, BEGIN - 0.5)
    pulled, _ = bench.push(0, g, lr=0.5)
    assert torch.allclose(pulled, BEGIN - 0.5 - 0.5)
    after, _ = bench.push(1, g, lr=0.0)
    assert torch.equal(after, pulled)


def test_an_absent_gradient_is_no_zero() -> None:
    bench = Bench()
    bench.inner.param_groups[0]["weight_decay"] = 0.1
    bench.server._optimizer.param_groups[0]["weight_decay"] = 0.1
    bench.begin()
    zero = torch.zeros(3, dtype=torch.float64)
    pulled, _ = bench.push(0, zero, absent=["w"])
    assert torch.equal(pulled, BEGIN)
    pulled, _ = bench.push(0, zero)
    assert not torch.equal(pulled, BEGIN)


def test_a_step_without_gradient_counts_as_a_step() -> None:
    bench = Bench(max_staleness=1)
    bench.begin()
    pulled, _ = bench.push(0, None)
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
    bench.server.leave(2, is_lost=True)
    thread.join(limit(5))
    [(_, reply)] = outcome  # type: ignore[misc]
    assert reply.lost == (2,)


def test_a_worker_that_is_done_does_not_delay_others() -> None:
    bench = Bench(max_staleness=0)
    bench.begin()
    thread, outcome = run_aside(lambda: bench.finish(1))
    while bench.server._workers[1].trains:
        time.sleep(0.001)
    for _ in range(3):
        pulled, _ = bench.push(0, torch.ones(3))
    last = bench.finish(0)
    thread.join(limit(5))
    assert torch.equal(bench.pulled(last), pulled)
    assert torch.equal(bench.pulled(outcome[0]), pulled)  # type: ignore[arg-type]


def test_a_wait_without_progress_ends_and_names_the_rank() -> None:
    timeout_s = limit(0.2)
    bench = Bench(max_staleness=0, timeout_s=timeout_s)
    bench.begin()
    began = time.monotonic()
    with pytest.raises(TimeLimitError, match=rf"{timeout_s:g} s \(.*rank 1 has made 0 steps"):
        bench.push(0, torch.ones(3))
    assert time.monotonic() - began > timeout_s
    assert bench.signs >= 2


def test_notify_of_others_prolong_the_wait() -> None:
    """Twice the limit in all, in so short steps that the machine may be busy."""
    timeout_s, num_steps = limit(0.3), 30
    bench = Bench(num_workers=3, max_staleness=num_steps, timeout_s=timeout_s)
    bench.begin()
    for _ in range(num_steps):
        bench.push(0, torch.ones(3))
    thread, outcome = run_aside(lambda: bench.push(0, torch.ones(3)))
    for _ in range(num_steps):
        time.sleep(2 * timeout_s / num_steps)
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
    bench.server.close(PeerLostError("The end."))
    thread.join(limit(5))
    assert isinstance(outcome[0], PeerLostError)
    with pytest.raises(PeerLostError, match=r"The end\."):
        bench.push(1, torch.ones(3))


def test_one_closed_after_a_time_limit_names_the_missing_rank() -> None:
    """Later requests get the cause, not that the server is gone."""
    bench = Bench(max_staleness=0, timeout_s=0.1)
    bench.begin()
    with pytest.raises(TimeLimitError, match="rank 1 has made 0 steps"):
        bench.push(0, torch.ones(3))
    bench.server.close(PeerLostError("The end."))
    with pytest.raises(TimeLimitError, match="rank 1 has made 0 steps"):
        bench.push(0, torch.ones(3))


def test_one_that_leaves_in_the_middle_is_lost_and_one_at_the_end_is_not() -> None:
    bench = Bench(num_workers=3)
    bench.begin()
    bench.server.leave(1)
    assert bench.server.lost == {1}
    thread, _ = run_aside(lambda: bench.finish(2))
    bench.finish(0)
    thread.join(limit(5))
    bench.server.leave(2)
    assert bench.server.lost == {1}
