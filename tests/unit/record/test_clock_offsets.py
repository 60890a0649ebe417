from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.limits import limit
from torchmn.control.rank_listener import RankAddress
from torchmn.record import clock_offsets
from torchmn.record.clock_offsets import ClockServer, measure_offset


@pytest.fixture
def address() -> Iterator[RankAddress]:
    server, is_over = ClockServer(["127.0.0.1"]), threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            server.serve(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    yield server.address
    is_over.set()
    thread.join()
    server.close()


def test_a_clock_is_its_own_within_the_error(address: RankAddress) -> None:
    found = measure_offset(address)
    assert found is not None
    assert abs(found.offset_s) <= found.error_s
    assert 0 < found.error_s < limit(1)


def test_an_offset_is_found(address: RankAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the rank shows 5 s less than that of rank 0."""

    class Slow:
        monotonic = staticmethod(time.monotonic)
        own = threading.get_ident()

        def perf_counter(self) -> float:
            return time.perf_counter() - (5 if threading.get_ident() == self.own else 0)

    monkeypatch.setattr(clock_offsets, "time", Slow())
    found = measure_offset(address)
    assert found is not None
    assert abs(found.offset_s - 5) <= found.error_s


def test_who_does_not_know_the_token_gets_no_time(address: RankAddress) -> None:
    assert measure_offset(address._replace(token="0" * 32)) is None


def test_a_server_that_has_ended_is_no_error() -> None:
    server = ClockServer(["127.0.0.1"])
    server.close()
    assert measure_offset(server.address) is None
