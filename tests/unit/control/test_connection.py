"""Messages between supervisor and agents: framing, back-pressure, authentication, ends."""

import fcntl
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.limits import limit
from torchmn.control import connection as channels
from torchmn.control.codec import decode, encode
from torchmn.control.connection import Channel
from torchmn.control.messages import (
    Exit,
    LogWarning,
    Message,
    Output,
    Round,
    RoundMember,
    ScriptStarted,
    Terminate,
)
from torchmn.errors import LaunchError
from torchmn.run.host_checks import HostFacts, ProbeHost
from torchmn.run.monitor.rank_monitor import Order


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    listener = channels.listen_on()
    one = Channel(socket.create_connection(listener.getsockname()))
    listener.setblocking(True)
    other = Channel(listener.accept()[0])
    listener.close()
    yield one, other
    one.close()
    other.close()


def collect(channel: Channel, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        messages += channel.collect()
        assert channel.is_open
    return messages


def test_messages_arrive_whole_and_in_order(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    sent = [
        Output(stream="out", lines=["a\nb", "ü", "\x1b[0m", "\x00"], num_bytes=9),
        Terminate(signum=15),
    ] * 50
    for message in sent:
        one.post(message)
    assert collect(other, len(sent)) == sent


def test_what_a_peer_has_sent_is_read_though_nothing_can_be_sent_to_it(
    pair: tuple[Channel, Channel],
) -> None:
    """It has ended, and its last words are in the buffer of the kernel; then its end is seen."""
    one, other = pair
    other.post(LogWarning(text="an error"))
    other.close()
    for _ in range(3):  # the first may still be taken by the kernel
        one.post(LogWarning(text="a request"))
    received: list[Message] = []
    while one.is_open:
        received += one.collect()
    assert received == [LogWarning(text="an error")]


def test_full_connection_does_not_block(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    sent = [LogWarning(text=f"{i}" * 100_000) for i in range(9)] * 20
    for message in sent:
        one.post(message)
    assert one.pending_bytes > 0
    received: list[Message] = []
    while len(received) < len(sent):
        received += other.collect()
        one.flush()
    assert received == sent
    assert one.pending_bytes == 0


def test_a_peer_that_sends_without_pause_does_not_block(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    line = LogWarning(text="x" * 1000)
    for _ in range(20_000):
        one.post(line)
    first = other.collect()
    assert 0 < len(first) < 20_000


def test_the_end_of_the_connection_is_seen_after_the_last_message(
    pair: tuple[Channel, Channel],
) -> None:
    one, other = pair
    one.post(Exit(returncode=3, ended_at=1.5, ended_by="itself"))
    one.close()
    messages: list[Message] = []
    while other.is_open:
        messages += other.collect()
    assert messages == [Exit(returncode=3, ended_at=1.5, ended_by="itself")]
    other.post(Terminate(signum=15))  # no peer is there: no error


def test_wait_for_keeps_what_follows(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    one.post(ScriptStarted(pid=7, cores=[], num_threads=1))
    one.post(Terminate(signum=2))
    assert other.wait_for(ScriptStarted, limit(5)).pid == 7
    assert collect(other, 1) == [Terminate(signum=2)]


def test_wait_for_rejects_silence_and_other_messages(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    with pytest.raises(LaunchError, match=r"no ScriptStarted within 0\.05 s"):
        other.wait_for(ScriptStarted, 0.05)
    one.post(Terminate(signum=2))
    with pytest.raises(LaunchError, match="instead of sending ScriptStarted"):
        other.wait_for(ScriptStarted, limit(5))


def test_wait_for_works_where_many_files_are_open(pair: tuple[Channel, Channel]) -> None:
    """select() knows the first 1024 descriptors only."""
    one, other = pair
    many, limits = 1100, resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2 * many), limits[1]))
    number = fcntl.fcntl(other.fileno(), fcntl.F_DUPFD, many)
    copy = Channel(socket.socket(fileno=number))
    try:
        with pytest.raises(LaunchError, match=r"no ScriptStarted within 0\.05 s"):
            copy.wait_for(ScriptStarted, 0.05)
        one.post(ScriptStarted(pid=7, cores=[], num_threads=1))
        assert copy.wait_for(ScriptStarted, limit(5)).pid == 7
    finally:
        copy.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# ---- orders and replies keep their values, and anything else is an error ----


ORDER = Round(
    number=1,
    members=[RoundMember(host="n0", slots=1), RoundMember(host="n1", slots=2)],
    num_restarts=0,
    reason="",
)


@pytest.mark.parametrize(
    "value",
    [
        ORDER,
        ProbeHost(cwd="/a\nb", script="\udcff.py"),
        HostFacts(versions={"torch": "2"}, network="10.0.0.0/24"),
        Order(rank=1, pid=2, server="a:1", secret="s", grace_s=0.5, descriptor=7),
    ],
)
def test_values_survive_as_one_line(value: object) -> None:
    line = encode(value)
    assert line.count(b"\n") == 1
    assert decode(line, type(value)) == value


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"\xff",
        b"[" * 9999,
        encode(Terminate(signum=15)),
        encode(ORDER).replace(b'"slots": 1', b'"slots": "1"'),
        encode(ORDER).replace(b'"n1"', b"7"),
        encode(ORDER).replace(b'"slots": 2', b'"slots": null'),
        encode(ORDER).replace(b'"members"', b'"other"'),
    ],
)
def test_other_values_are_errors(line: bytes) -> None:
    with pytest.raises(ValueError, match="Not a message"):
        decode(line, Round)


FIRST_IN_THREADS = """
import sys, threading
from torchmn.control.messages import StatusReply, decode, encode
line, start, found = encode(StatusReply(collectives=())), threading.Barrier(32), []
def work():
    start.wait()
    found.append(decode(line))
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=work) for _ in range(32)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(found) == 32
"""


def test_several_threads_may_be_the_first_to_decode() -> None:
    """By itself msgspec ends by a segmentation fault in one of six such processes."""
    for _ in range(4):
        subprocess.run([sys.executable, "-c", FIRST_IN_THREADS], check=True, timeout=limit(60))
