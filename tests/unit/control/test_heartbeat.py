"""Whether the process at the other end runs: one question at a time, and answers."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from torchmn.control import heartbeat
from torchmn.control.connection import Channel
from torchmn.control.heartbeat import Heartbeat, LoopClock, answer, share_of
from torchmn.control.messages import Alive, HeartbeatRequest
from torchmn.errors import UsageError


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    one, other = map(Channel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_a_peer_is_silent_until_it_answers(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    beat = Heartbeat(ours)
    assert beat.silent_s(100.0) == 0.0
    assert [beat.silent_s(100.0 + s) for s in (1.0, 29.0, 31.0)] == [1.0, 29.0, 31.0]
    assert theirs.collect() == [HeartbeatRequest()]  # one, though it was not answered
    answer(theirs)
    (reply,) = ours.collect()
    assert isinstance(reply, Alive)
    beat.answered()
    assert beat.silent_s(132.0) == 0.0
    assert beat.silent_s(132.5) == 0.5
    assert theirs.collect() == [HeartbeatRequest()]


def test_stopped_processes_are_reported(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            answer(theirs, process.pid)
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            answer(theirs, process.pid)
        finally:
            process.kill()
    before, after = ours.collect()
    assert isinstance(before, Alive)
    assert isinstance(after, Alive)
    assert before.stopped == []
    assert [each.pid for each in after.stopped] == [process.pid]
    assert after.stopped[0].name.startswith("python")


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_the_limit_is_a_number_of_seconds(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("TORCHMN_HEARTBEAT_S", text)
    with pytest.raises(UsageError, match="TORCHMN_HEARTBEAT_S="):
        Heartbeat(pair[0])


def test_a_pause_of_this_process_counts_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    clock = LoopClock()
    start = clock.now
    now += 0.25
    assert clock.tick() - start == pytest.approx(0.25)
    now += 3600.0
    assert clock.tick() - start == pytest.approx(1.25)


@pytest.mark.parametrize("num", [1, 2, 3, 8])
@pytest.mark.parametrize("num_processes", [0, 1, 2, 9, 17])
def test_every_process_beside_the_ranks_is_seen_by_two(num: int, num_processes: int) -> None:
    pids = [100 + 7 * i for i in range(num_processes)]
    shares = [share_of(reversed(pids), index, num) for index in range(num)]
    for pid in pids:
        assert sum(pid in share for share in shares) == min(2, num)
    assert max(map(len, shares)) <= 2 * -(-num_processes // num)
