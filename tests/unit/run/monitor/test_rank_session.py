"""The selector of a session's connections, which is kept from one wait to the next."""

import contextlib
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchmn.control.connection import Channel
from torchmn.control.messages import AgentHello, Exit, HeartbeatRequest, Message
from torchmn.run.monitor.rank_session import RankSession

NUM_RANKS = 5


class Listener:
    """Admits the ranks that a test has put into ``arrived``."""

    def __init__(self) -> None:
        self.arrived: list[tuple[Channel, Message]] = []
        self._reading, self._writing = socket.socketpair()

    def fileno(self) -> int:
        return self._reading.fileno()

    def connect(self, rank: int) -> Channel:
        ours, theirs = socket.socketpair()
        hello = AgentHello(rank=rank, host="n", pid=1, address="", port=0, versions={})
        self.arrived.append((Channel(ours), hello))
        self._writing.send(b".")
        return Channel(theirs)

    def admit(self) -> list[tuple[Channel, Message]]:
        self._reading.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._reading.recv(100)
        found, self.arrived = self.arrived, []
        return found

    def close(self) -> None:
        self._reading.close()
        self._writing.close()


@pytest.fixture
def found(tmp_path: Path) -> Iterator[tuple[RankSession, Listener]]:
    listener: Any = Listener()
    session = RankSession(listener, NUM_RANKS, tmp_path)
    yield session, listener
    session.close()


def wait(session: RankSession, seconds: float = 0.0) -> bool:
    """One turn of the loop of a launcher: whether anything was ready."""
    with selectors.DefaultSelector() as selector:
        session.register(selector)
        ready = selector.select(seconds)
        for key, _ in ready:
            key.data()
    session.accept()
    return bool(ready)


def ended(code: int) -> Exit:
    return Exit(returncode=code, ended_at=1.0, ended_by="itself", note="")


def test_messages_of_all_ranks_arrive(found: tuple[RankSession, Listener]) -> None:
    session, listener = found
    peers = [listener.connect(rank) for rank in range(NUM_RANKS)]
    assert wait(session, 5.0)
    assert session.is_complete
    assert not wait(session)
    for rank, peer in enumerate(peers):
        peer.post(ended(rank))
    assert wait(session, 5.0)
    exits = [record.exit for record in session.records]
    assert [each.returncode for each in exits if each] == [*range(NUM_RANKS)]
    assert not wait(session)
    for peer in peers:
        peer.close()


def test_a_lost_connection_is_processed_once(found: tuple[RankSession, Listener]) -> None:
    """Its end stays readable: a loop that watched it any longer would never wait."""
    session, listener = found
    peers = [listener.connect(rank) for rank in (0, 1)]
    wait(session, 5.0)
    wait(session)
    peers[0].close()
    assert wait(session, 5.0)
    assert session.records[0].lost_at is not None
    assert not wait(session)
    peers[1].post(ended(0))
    assert wait(session, 5.0)
    assert session.records[1].exit is not None
    peers[1].close()


def test_a_connection_whose_end_is_noticed_by_sending(found: tuple[RankSession, Listener]) -> None:
    """Before it was seen to be readable: the rank is lost all the same."""
    session, listener = found
    peer = listener.connect(0)
    wait(session, 5.0)
    peer.close()
    session.post(HeartbeatRequest())
    assert not session.connections[0].channel.is_open
    wait(session, 5.0)
    assert session.records[0].lost_at is not None


def test_a_connection_with_the_number_of_a_closed_one(found: tuple[RankSession, Listener]) -> None:
    session, listener = found
    first = listener.connect(0)
    wait(session, 5.0)
    wait(session)
    number = session.connections[0].channel.fileno()
    session.disconnect([session.connections[0]])
    first.close()
    later = [listener.connect(rank) for rank in (1, 2)]
    assert number in [channel.fileno() for channel, _ in listener.arrived]
    wait(session, 5.0)
    wait(session)
    for peer in later:
        peer.post(ended(0))
    assert wait(session, 5.0)
    assert [record.exit is not None for record in session.records[:3]] == [False, True, True]
    for peer in later:
        peer.close()
