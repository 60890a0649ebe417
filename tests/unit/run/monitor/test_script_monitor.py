"""What a script reports to its agent. Whole processes are tested in test_crash.py."""

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.limits import limit
from torchmn.cluster.environment_variables import MONITOR_VARIABLE
from torchmn.comm.flight_recorder import FlightRecorder
from torchmn.control.connection import Channel
from torchmn.control.messages import (
    EngineStatus,
    Leaving,
    ProcessState,
    StatusReply,
    StatusRequest,
)
from torchmn.control.script import is_consequence
from torchmn.control.script_connection import ScriptLink
from torchmn.errors import (
    CommunicationError,
    PeerLostError,
    RankMismatchError,
    TimeLimitError,
    UsageError,
)
from torchmn.run.monitor import script_monitor
from torchmn.testing import run_ranks


def test_the_bootstrap_is_where_stacks_leave_it_out() -> None:
    assert Path(script_monitor._BOOTSTRAP).is_file()


def chained(error: Exception, cause: Exception) -> Exception:
    try:
        raise error from cause
    except Exception as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (PeerLostError("gone"), True),
        (TimeLimitError("late"), True),
        (CommunicationError("unusable since ..."), True),
        (chained(RuntimeError("training failed"), PeerLostError("gone")), True),
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"), True),
        (RankMismatchError("ranks differ"), False),
        (chained(RankMismatchError("ranks differ"), PeerLostError("x")), False),
        (UsageError("wrong"), False),
        (ValueError("connection closed"), False),
        (MemoryError(), False),
    ],
)
def test_errors_that_are_a_consequence_of_lost_peers(error: Exception, follows: bool) -> None:
    assert is_consequence(error) is follows


def test_a_cycle_of_causes_terminates() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert not is_consequence(first)


def test_an_error_that_cannot_be_printed() -> None:
    class OwnError(Exception):
        def __str__(self) -> str:
            raise AttributeError("no message")

    assert not is_consequence(OwnError())


def test_without_an_agent_nothing_is_installed() -> None:
    assert script_monitor.current() is None
    reading, writing = os.pipe()
    environ = {MONITOR_VARIABLE: f"{reading}:{os.getpid()}"}
    assert script_monitor.install_from_environment(environ) is None  # not a socket
    assert environ == {}
    os.close(reading)
    os.close(writing)
    environ = {MONITOR_VARIABLE: f"{reading}:{os.getpid()}"}
    assert script_monitor.install_from_environment(environ) is None  # closed
    own, other = socket.socketpair()
    environ = {MONITOR_VARIABLE: f"{own.fileno()}:{os.getpid() + 1}"}
    assert script_monitor.install_from_environment(environ) is None  # made by another process
    own.getpeername()  # and it was left open
    own.close()
    other.close()


def test_a_communicator_leaves_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = socket.socketpair()
    own.set_inheritable(True)
    monkeypatch.setenv(MONITOR_VARIABLE, f"{own.fileno()}:{os.getpid()}")
    before = sys.excepthook, sys.exit, dict(os.environ)
    run_ranks(lambda comm: comm.barrier(), 2, name="naive")
    assert (sys.excepthook, sys.exit, dict(os.environ)) == before
    assert "torchmn-monitor" not in {thread.name for thread in threading.enumerate()}
    assert script_monitor.current() is None
    own.close()
    other.close()


def test_the_agent_replies_for_a_silent_script() -> None:
    forwarded: list[object] = []
    own, other = socket.socketpair()
    link = ScriptLink(forwarded.append, own)
    link.script_started(os.getpid())
    before = time.monotonic()
    link.request_status(StatusRequest(limit_s=100.0))
    assert link.reply_by is not None
    assert 100 <= link.reply_by - before < 110
    link.reply_if_overdue()
    assert forwarded == []
    link.request_status(StatusRequest(limit_s=200.0))
    link._reply_by[0] -= 110
    link.reply_if_overdue()
    assert len(forwarded) == 1
    assert link.reply_by is not None  # of the second request, which has its own limit
    assert isinstance(forwarded[0], StatusReply)
    assert forwarded[0].process is ProcessState.RUNNING
    assert forwarded[0].rss_nbytes > 1_000_000
    other.close()
    own.close()


def test_only_messages_of_scripts_are_forwarded() -> None:
    forwarded: list[object] = []
    own, other = socket.socketpair()
    link = ScriptLink(forwarded.append, own)
    script = Channel(other)
    script.post(Leaving(status=3))
    script.post(StatusRequest(limit_s=1.0))  # not a message of scripts
    link.forward_messages()
    assert forwarded == [Leaving(status=3)]
    script.close()
    link.forward_messages()
    assert not link.is_open
    own.close()


def test_a_status_has_what_was_asked_for() -> None:
    """Stacks, collectives and queue; the memory of the device as the record has measured it."""
    own, other = socket.socketpair()
    agent = Channel(other)
    monitor = script_monitor.ScriptMonitor(own)
    recorder = FlightRecorder(job_ranks=(0, 1), has_whole_job=True)
    recorder.look_at_engine = lambda ranks: EngineStatus(
        ranks=ranks, is_running=True, num_queued=3, num_on_device=0
    )
    monitor.collectives(recorder)
    monitor.memory(7_000)
    for number in range(5):
        entry = recorder.begin("world", f"barrier{number}", (), "uint8")
        if number < 4:
            recorder.end(entry, "done")
    replies = []
    for num_recent in (0, 3):
        agent.post(StatusRequest(limit_s=1.0, num_recent=num_recent))
        replies.append(agent.wait_for(StatusReply, limit(20)))
    plain, full = replies
    assert plain.recent == ()
    assert [each.what for each in full.recent] == ["barrier2", "barrier3", "barrier4"]
    assert [each.state for each in full.recent] == ["done", "done", "running"]
    assert full.engines == (EngineStatus(ranks=(), is_running=True, num_queued=3, num_on_device=0),)
    assert full.device_nbytes == 7_000
    assert full.rss_nbytes > 1_000_000
    assert "MainThread:" in full.stacks
    assert "test_a_status_has_what_was_asked_for" in full.script_stack
    agent.close()
    (thread,) = (each for each in threading.enumerate() if each.name == "torchmn-monitor")
    thread.join(limit(20))
    own.close()
