"""One collective at a time, in the order in which they were submitted."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from tests.limits import limit
from torchmn.comm.engine import Engine
from torchmn.comm.streams import HostStreams
from torchmn.errors import CommunicationError, PeerLostError, RankMismatchError, TimeLimitError

CPU = torch.device("cpu")


@pytest.fixture
def engine():
    made = Engine(CPU)
    yield made
    made.close()


def test_jobs_run_in_the_order_of_calls(engine: Engine) -> None:
    done: list[int] = []
    works = [engine.submit(lambda i=i: done.append(i) or i) for i in range(3)]
    assert engine.call(lambda: done.append(3) or 3) == 3
    works.append(engine.submit(lambda: done.append(4) or 4))
    assert [work.wait() for work in reversed(works)] == [4, 2, 1, 0]
    assert done == [0, 1, 2, 3, 4]
    assert all(work.done for work in works)
    assert works[0].wait() == 0  # once more


def test_a_call_runs_on_the_calling_thread_when_nothing_is_in_flight(engine: Engine) -> None:
    assert engine.call(threading.get_ident) == threading.get_ident()
    assert engine.submit(threading.get_ident).wait() != threading.get_ident()
    assert engine.call(threading.get_ident) == threading.get_ident()


def test_submit_returns_before_the_job_is_done(engine: Engine) -> None:
    may_end = threading.Event()
    work = engine.submit(lambda: may_end.wait(timeout=limit(10)))
    assert not work.done
    may_end.set()
    assert work.wait() is True


class _Queues(HostStreams):
    """Of a device whose work is done when it is queued."""

    is_host = False


def test_a_job_that_only_queues_runs_on_the_calling_thread_when_nothing_is_in_flight() -> None:
    engine = Engine(torch.device("cpu"), streams=_Queues())
    begins, ends = threading.Event(), threading.Event()
    order: list[str] = []

    def long() -> int:
        begins.set()
        assert ends.wait(limit(10))
        order.append("long")
        return threading.get_ident()

    here = threading.get_ident()
    assert engine.submit(threading.get_ident, only_queues=True).wait() == here
    first = engine.submit(long)
    assert begins.wait(limit(10))
    second = engine.submit(lambda: order.append("short"), only_queues=True)
    assert not second.done  # it keeps its turn
    ends.set()
    second.wait()
    assert first.wait() != here
    assert order == ["long", "short"]
    failing = engine.submit(lambda: 1 // 0, only_queues=True)
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    engine.close()


def test_a_job_runs_in_the_inference_mode_of_its_call(engine: Engine) -> None:
    ordinary = engine.submit(lambda: torch.ones(1))
    with torch.inference_mode():
        value = torch.ones(1)
        changed = engine.submit(lambda: value.add_(1))
        assert not ordinary.wait().is_inference()
        assert changed.wait().item() == 2
        assert engine.call(lambda: value.add_(1)).item() == 3
    assert not engine.submit(lambda: torch.ones(1)).wait().is_inference()


def test_a_work_whose_owner_holds_it_is_freed_without_the_collector(engine: Engine) -> None:
    """A collector in a forked process, such as a loader's worker, must meet no CUDA events."""

    class Owner:
        def __init__(self) -> None:
            self.work = engine.submit(self.job)

        def job(self) -> None:
            pass

    owner = Owner()
    alive = weakref.ref(owner)
    owner.work.wait()
    gc.disable()
    try:
        del owner
        while not engine.is_idle:
            pass
        assert alive() is None
    finally:
        gc.enable()


def test_an_error_is_raised_by_wait_and_the_engine_continues(engine: Engine) -> None:
    def fail() -> None:
        raise RankMismatchError("not this")

    work = engine.submit(fail)
    after = engine.submit(lambda: 1)
    with pytest.raises(RankMismatchError, match="not this"):
        work.wait()
    assert after.wait() == 1
    with pytest.raises(RankMismatchError, match="not this"):
        engine.call(fail)
    assert engine.call(lambda: 2) == 2


@pytest.mark.parametrize("kind", [TimeLimitError, PeerLostError])
@pytest.mark.parametrize("way", ["call", "submit"])
def test_after_a_failed_exchange_further_calls_raise(engine: Engine, kind, way) -> None:
    def fail() -> None:
        raise kind("rank 3 is gone")

    later = []
    if way == "call":
        with pytest.raises(kind):
            engine.call(fail)
    else:
        work, queued = engine.submit(fail), engine.submit(lambda: later.append(1))
        for each in (work, queued):
            with pytest.raises(kind, match="rank 3 is gone"):
                each.wait()
    for ask in (engine.call, engine.submit):
        with pytest.raises(CommunicationError, match="after an exchange failed: rank 3"):
            ask(lambda: later.append(1))
    assert later == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, CommunicationError])
@pytest.mark.parametrize("has_peers", [True, False])
def test_an_error_of_this_rank_alone(kind: type[BaseException], has_peers: bool) -> None:
    """Others may wait in the middle of the exchange, if there are others: Ctrl-C in a notebook."""

    def fail() -> None:
        raise kind("here only")

    engine = Engine(CPU, has_peers=has_peers)
    with pytest.raises(kind, match="here only"):
        engine.call(fail)
    if has_peers:
        with pytest.raises(CommunicationError, match="after an exchange failed: here only"):
            engine.call(lambda: 1)
    else:
        assert engine.call(lambda: 1) == 1
    engine.close()


def test_close_completes_the_queue_and_rejects_more(engine: Engine) -> None:
    done: list[int] = []
    for i in range(5):
        engine.submit(lambda i=i: done.append(i))
    engine.close()
    engine.close()
    assert done == [0, 1, 2, 3, 4]
    for ask in (engine.call, engine.submit):
        with pytest.raises(CommunicationError, match="was finalized. Create a new one"):
            ask(lambda: None)


def test_may_spin_only_while_no_thread_computes(engine: Engine) -> None:
    assert engine.call(engine.is_eager) is True  # on the thread that would compute
    seen: list[bool] = []
    began, may_end = threading.Event(), threading.Event()

    def job() -> None:
        seen.append(engine.is_eager())
        began.set()
        may_end.wait(timeout=limit(10))
        while not engine.is_eager():  # until a caller waits
            pass

    work = engine.submit(job)
    assert began.wait(timeout=limit(10))
    may_end.set()
    work.wait()
    assert seen == [False]
