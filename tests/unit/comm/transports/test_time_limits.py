"""Pauses of long waits, their end by another thread, and what runs before a communicator ends."""

import threading
import time
from types import SimpleNamespace

import pytest

from tests.limits import limit
from torchmn.comm.transports import base
from torchmn.comm.transports.base import BackoffTimeLimit, TimeLimit, poll_until
from torchmn.testing import run_ranks


def test_a_long_wait_polls_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves while it sleeps alone."""
    now, pauses = 100.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert not poll_until(lambda: False, TimeLimit(0.2, lambda: False), polls_before_yield=1)
    impatient = len(pauses)
    pauses.clear()
    patient = BackoffTimeLimit(0.2, longest_pause_s=0.02)
    assert not poll_until(lambda: False, patient, polls_before_yield=1)
    assert 5 < len(pauses) < min(300, impatient)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(0.02)


def test_it_can_be_ended_from_another_thread() -> None:
    waits = BackoffTimeLimit(1000, longest_pause_s=0.01)
    threading.Timer(0.05, waits.end).start()
    began = time.monotonic()
    assert not poll_until(lambda: False, waits, polls_before_yield=1)
    assert time.monotonic() - began < limit(100)


def test_on_finalize_runs_before_the_communicator_ends() -> None:
    def job(comm) -> list[str]:
        order: list[str] = []
        comm.on_finalize(lambda: order.append(comm.allreduce_obj("a")))
        channels = comm.groups.new_transport("own")
        assert (channels.rank, channels.size) == (comm.rank, comm.size)
        comm.finalize()
        comm.finalize()
        return order

    assert run_ranks(job, 2) == [["aa"], ["aa"]]
