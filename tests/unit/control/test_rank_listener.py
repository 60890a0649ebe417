"""Listeners of ranks for other ranks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from tests.limits import limit
from torchmn.control.rank_listener import RankAddress, connect_to_rank, listen_for_ranks


@pytest.fixture
def address() -> Iterator[RankAddress]:
    """Of a listener that sends each client its own line."""
    listener, address = listen_for_ranks(["127.0.0.1"], "test")
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.wait(0.01):
            for client, line in listener.accept():
                with client:
                    client.sendall(line)

    thread = threading.Thread(target=serve)
    thread.start()
    with contextlib.closing(listener):
        yield address
        is_over.set()
        thread.join()


def test_who_knows_the_token_connects(address: RankAddress) -> None:
    connection = connect_to_rank(address, "test", b"rank 1\n", limit(10))
    assert connection is not None
    with connection:
        assert connection.recv(100) == b"rank 1\n"


def test_a_host_that_refuses_is_passed_over(address: RankAddress) -> None:
    hosts = ["127.0.0.2", "127.0.0.1"]  # the listener is on one interface
    connection = connect_to_rank(address._replace(hosts=hosts), "test", b"1\n", limit(10))
    assert connection is not None
    connection.close()


@pytest.mark.parametrize("change", [{"token": "0" * 32}, {"hosts": []}])
def test_others_do_not(address: RankAddress, change: dict[str, object]) -> None:
    began_s = time.monotonic()
    wrong = address._replace(**change)
    assert connect_to_rank(wrong, "test", b"1\n", limit(10), retries=False) is None
    assert time.monotonic() - began_s < limit(10)


def test_the_secret_of_the_job_counts(
    address: RankAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHMN_SECRET", "of another job")
    assert connect_to_rank(address, "test", b"1\n", limit(10), retries=False) is None
