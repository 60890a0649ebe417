"""A rank that works is waited for longer than one that will not arrive."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch

import torchmn
from tests.limits import limit
from tests.unit.comm.ranks import one_stays_away, run_transports
from torchmn import Timeout, TorchmnError
from torchmn.cluster import Topology
from torchmn.comm import Communicator, waiting
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.errors import RankMismatchError, TimeLimitError, UsageError

Result = TypeVar("Result")


def run(
    function: Callable[[Communicator], Result],
    size: int,
    timeout: Timeout,
    *,
    name: str = "flat",
    hosts: tuple[str, ...] = (),
) -> list[Result]:
    """As `run_ranks`, with both limits."""

    def rank_main(transport: TorchDistributedTransport) -> Result:
        comm = torchmn.create_communicator(
            name,
            transport=transport,
            topology=Topology(hosts or ("localhost",) * size),
            timeout_s=replace(timeout, first_s=timeout.unreachable_s),
        )
        try:
            return function(comm)
        finally:
            comm.finalize()

    return run_transports(rank_main, size)


def errors_of(function: Callable[[Communicator], object], size: int, timeout: Timeout) -> list[str]:
    """What each rank raises, with its kind; empty if it raises nothing."""

    def attempt(comm: Communicator) -> str:
        try:
            function(comm)
        except TorchmnError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run(attempt, size, timeout)


def evaluates_alone(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize(("name", "hosts"), [("flat", ()), ("hierarchical", ("a", "a", "b", "b"))])
def test_a_rank_that_works_is_waited_for_with_one_message(
    name: str, hosts: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a rank waits for one that itself waits: for the leader of its node."""
    ask_s = limit(0.3)

    def train(comm: Communicator) -> float:
        buffer = torch.ones(4)
        comm.barrier()
        if comm.rank == 0:
            evaluates_alone(3 * ask_s)
        comm.route.sum_(buffer)
        return float(buffer[0])

    size = len(hosts) or 3
    timeout = Timeout(ask_s, limit(60))
    assert run(train, size, timeout, name=name, hosts=hosts) == [size] * size
    texts = [text for text in caplog.messages if "waited for" in text]
    assert texts, "no message"
    assert all("rank 0 did not reach it: rank 0 on" in text for text in texts)
    assert "test_waiting.py" in texts[0]
    assert "in evaluates_alone" in texts[0]
    assert "Timeout(busy_s=...)" in texts[0]
    assert len(texts) == 1


def test_the_limit_of_a_rank_that_works() -> None:
    ask_s, busy_s = limit(0.2), limit(0.8)
    is_over = threading.Event()

    def train(comm: Communicator) -> None:
        if comm.rank == 0:
            is_over.wait(limit(30))
        try:
            comm.barrier()
        finally:
            is_over.set()

    _, found = errors_of(train, 2, Timeout(ask_s, busy_s))
    assert found.startswith("TimeLimitError")
    assert f"within {busy_s:g} s; rank 0 did not reach it" in found
    assert found.count(" within ") == 1  # the limit at which the others were asked is not shown
    assert "rank 0 did not reach it: rank 0 on localhost runs at" in found


def test_ranks_in_different_collectives_end_after_the_short_limit() -> None:
    """Each waits for the other, in groups of their own."""

    def train(comm: Communicator) -> None:
        other = comm.split(0, comm.rank)
        began = time.monotonic()
        (comm if comm.rank == 0 else other).world.barrier()
        assert time.monotonic() - began < limit(30)

    found = errors_of(train, 2, Timeout(limit(0.3), limit(60)))
    assert any(text.startswith("TimeLimitError") for text in found), found
    late = next(text for text in found if text.startswith("TimeLimitError"))
    assert "the ranks are in different collectives" in late


def test_a_rank_that_cannot_be_reached_ends_after_the_short_limit() -> None:
    is_over = threading.Event()

    def train(comm: Communicator) -> None:
        if comm.rank == 0:
            assert comm.flight_recorder.peers is not None
            comm.flight_recorder.peers.close()
            is_over.wait(limit(30))
            return
        time.sleep(limit(0.5))  # until the other one has stopped to answer
        try:
            comm.barrier()
        finally:
            is_over.set()

    _, found = errors_of(train, 2, Timeout(limit(0.3), limit(60)))
    assert found.startswith("TimeLimitError")
    assert "rank 0 on localhost has ended, or closed its communicator" in found


def test_who_arrives_late_has_the_whole_limit_for_the_exchange() -> None:
    """The others do not end what has only just begun: the limit counts from the last arrival."""
    ask_s = limit(0.4)

    def train(comm: Communicator) -> float:
        for delay in (1.0, 1.6):
            if comm.rank == 0:
                time.sleep(delay * ask_s)
            comm.barrier()
        return 1.0

    assert run(train, 3, Timeout(ask_s, limit(60))) == [1.0] * 3


def test_a_number_is_the_limit_for_both() -> None:
    def call(comm: Communicator) -> None:
        assert comm.flight_recorder.peers is None
        with pytest.raises(TimeLimitError):
            comm.barrier()

    one_stays_away(call)


def test_communicators_split_off_ask_as_well(caplog: pytest.LogCaptureFixture) -> None:
    ask_s = limit(0.3)

    def train(comm: Communicator) -> int:
        part = comm.subgroup([0, 2])
        if part is None:
            return 0
        if comm.rank == 0:
            evaluates_alone(2 * ask_s)
        return len(part.allgather_obj(1))

    assert run(train, 3, Timeout(ask_s, limit(60))) == [2, 0, 2]
    assert "rank 0 did not reach it" in caplog.text


def test_values() -> None:
    for unreachable_s, busy_s in ((0, 1), (2, 1), (1, float("inf")), (-1, 1)):
        with pytest.raises(UsageError, match="busy_s not less than unreachable_s"):
            Timeout(unreachable_s, busy_s)
    assert Timeout() == Timeout(unreachable_s=60, busy_s=600)


def test_ranks_that_give_other_limits() -> None:
    def rank_main(transport: TorchDistributedTransport) -> None:
        timeout_s = limit(20) + transport.rank
        torchmn.create_communicator("flat", transport=transport, timeout_s=timeout_s)

    with pytest.raises(RankMismatchError, match="timeout_s"):
        run_transports(rank_main, 2)


def test_a_rank_that_has_ended_is_noticed_long_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through shared memory nothing else tells that a process has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(waiting, "_FIRST_S", limit(0.2))
    is_over = threading.Event()

    def train(comm: Communicator) -> float:
        peers = comm.flight_recorder.peers
        assert peers is not None
        if comm.rank == 0:
            peers.close()
            is_over.wait(limit(30))
            return 0.0
        peers._peers = {0: peers._peers[0]._replace(pid=ended.pid)}
        time.sleep(limit(0.5))  # until the other one has stopped to answer
        began = time.monotonic()
        with pytest.raises(TimeLimitError, match="rank 0 on localhost has ended .did it stop"):
            comm.barrier()
        is_over.set()
        return time.monotonic() - began

    assert run(train, 2, Timeout(limit(60), limit(90)))[1] < limit(30)
