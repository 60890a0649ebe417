"""The agents of a job and of an elastic round, over connections within this process."""

import errno
import io
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from torchmn.control.connection import Channel
from torchmn.control.messages import (
    AgentHello,
    Exit,
    Failed,
    Leaving,
    Message,
    Output,
    Round,
    RoundMember,
    ScriptStarted,
    StartScript,
)
from torchmn.run.agent_session import AgentSession
from torchmn.run.console import RankOutput
from torchmn.run.elastic.launcher import RoundSession
from torchmn.run.job import Job
from torchmn.run.monitor.job_result import JobResult

VERSIONS = {"torch": "2.13"}


class NoListener:
    """No client connects: the tests admit channels themselves."""

    def __init__(self) -> None:
        self._socket = socket.socket()

    def fileno(self) -> int:
        return self._socket.fileno()

    def admit(self) -> list[tuple[Channel, Message]]:
        return []

    def close(self) -> None:
        self._socket.close()


class SilentSocket:
    """The socket of a connection whose host does not answer any more."""

    family = socket.AF_UNIX

    def __init__(self) -> None:
        self.is_silent = False
        self._socket = socket.socket()

    def fileno(self) -> int:
        return self._socket.fileno()

    def setblocking(self, _: bool) -> None:
        pass

    def send(self, message: bytes) -> int:
        return len(message)

    def recv(self, _: int) -> bytes:
        raise (
            OSError(errno.ETIMEDOUT, "Connection timed out")
            if self.is_silent
            else (BlockingIOError())
        )

    def close(self) -> None:
        self._socket.close()


class Agents:
    """A session with ``num_ranks`` ranks, and the other ends of the connections."""

    def __init__(self, session: AgentSession, err: io.StringIO) -> None:
        self.session = session
        self.err = err
        self.peers: dict[int, Channel] = {}

    def connect(self, rank: int, versions: dict[str, str] = VERSIONS, host: str = "") -> bool:
        ours, theirs = socket.socketpair()
        self.peers[rank] = Channel(theirs)
        return self.session.admit(Channel(ours), hello(rank, versions, host))

    def connect_all(self) -> "Agents":
        for rank in range(2):
            self.connect(rank)
        return self

    def send(self, rank: int, message: Message) -> None:
        self.peers[rank].post(message)
        self.session.receive(self.session.connections[rank])

    def close(self) -> None:
        self.session.close()
        for peer in self.peers.values():
            peer.close()


def hello(rank: int, versions: dict[str, str] = VERSIONS, host: str = "") -> AgentHello:
    return AgentHello(
        rank=rank, host=host or f"n{rank}", pid=1, address="10.0.0.1", port=9, versions=versions
    )


@pytest.fixture(params=["job", "round"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Agents]]:
    """Makes the agents of a job, or of a round of an elastic one."""
    made: list[Agents] = []

    def make(**options: Any) -> Agents:
        err = io.StringIO()
        output = RankOutput(io.StringIO(), err)
        job = Job(argv=("x",), num_ranks=2, backend="gloo", log_dir=tmp_path, **options)
        listener: Any = NoListener()
        if request.param == "job":
            session = AgentSession(listener, 2, job, tmp_path, output)
        else:
            members = [RoundMember(host=f"n{i}", slots=1) for i in range(2)]
            found = Round(number=1, members=members, num_restarts=0, reason="")
            saved: list[object] = []
            session = RoundSession(
                found,
                job,
                listener,
                output,
                on_checkpoint=saved.append,
                on_notice=lambda host, text: saved.append((host, text)),
            )
        made.append(Agents(session, err))
        return made[-1]

    yield make
    for agents in made:
        agents.close()


def test_scripts_start_when_all_agents_have_connected(make: Callable[..., Agents]) -> None:
    agents = make()
    assert agents.connect(1)
    assert agents.peers[1].collect() == []
    assert agents.connect(0)
    (order,) = agents.peers[1].collect()
    assert isinstance(order, StartScript)
    rendezvous = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "9"}
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1"}
    assert order.env.items() >= {**rendezvous, **place}.items()


def test_a_rank_that_is_unknown_or_connected_is_rejected(make: Callable[..., Agents]) -> None:
    agents = make()
    assert agents.connect(0)
    first = agents.peers[0]
    assert not agents.connect(0)
    assert not agents.connect(2)
    agents.peers[3] = first


def test_different_versions_are_a_problem(make: Callable[..., Agents]) -> None:
    agents = make()
    agents.connect(0)
    agents.connect(1, {"torch": "2.12"})
    (problem,) = agents.session.take_problems()
    assert "torch is 2.13 on n0 and 2.12 on n1" in problem
    assert agents.peers[0].collect() == []


def test_binding_is_written(make: Callable[..., Agents]) -> None:
    agents = make().connect_all()
    agents.send(1, ScriptStarted(pid=0, cores=[2, 3], num_threads=2))
    written = (agents.session.log_dir / "binding.txt").read_text()
    assert written == "rank 1 on n1: cores 2, 3, 2 threads\n"
    assert agents.err.getvalue() == ""


def test_a_silent_host_differs_from_a_dead_agent(make: Callable[..., Agents]) -> None:
    agents = make()
    agents.connect(0)
    connection: Any = SilentSocket()
    agents.session.admit(Channel(connection), hello(1))
    connection.is_silent = True
    agents.session.receive(agents.session.connections[1])
    assert agents.session.must_end(time.monotonic())
    summary = agents.session.result().summary
    assert "rank 1 on n1 was lost: its host has not answered" in summary


def test_a_rank_that_we_disconnect_has_not_failed(make: Callable[..., Agents]) -> None:
    agents = make()
    agents.connect(0)
    agents.session.disconnect(agents.session.connections.values())
    assert not agents.session.must_end(time.monotonic())
    assert not agents.session.is_open


def test_what_failed_is_shown_again_if_it_is_not_what_was_shown_last(
    make: Callable[..., Agents],
) -> None:
    agents = make().connect_all()
    session = agents.session

    def write(rank: int, stream: str, *lines: str) -> None:
        agents.send(rank, Output(stream=stream, lines=list(lines), num_bytes=10))

    def shown_again() -> bool:
        before = len(agents.err.getvalue())
        result = session.result()
        assert result.first_failure is session.records[1]
        session.report_failure(session.log_dir, result, "summary")
        return "End of stderr of rank 1" in agents.err.getvalue()[before:]

    write(0, "out", "one", "two")
    write(1, "err", "ValueError: this")
    agents.send(1, Exit(returncode=1, ended_at=1.0, ended_by="itself", note=""))
    assert not shown_again()
    write(0, "err", "later")
    assert not shown_again()
    write(0, "out", *map(str, range(20)))
    assert shown_again()
    write(1, "err", "newer")
    assert not shown_again()


def failure(rank: int, *, is_shown: bool = False, error: str = "") -> Failed:
    error = error or f"RankMismatchError: rank {rank} of 2 on n{rank}: the shapes differ"
    return Failed(
        status=1,
        traceback=f"Traceback\n  the script's frames\n{error}",
        error=error,
        is_consequence=False,
        at=1.0 + rank,
        whole=f"Traceback\n  all frames\n{error}",
        is_shown=is_shown,
    )


def report(agents: Agents, *messages: Message) -> tuple[str, str]:
    """What is shown after these messages of ranks 0, 1, ... and the report in the file."""
    agents.connect_all()
    for rank, message in enumerate(messages):
        agents.send(rank, message)
        agents.send(rank, Exit(returncode=1, ended_at=2.0, ended_by="itself", note=""))
    session = agents.session
    result = session.result()
    session.report_failure(session.log_dir, result, result.summary)
    session._output.say(result.summary)
    text = (session.log_dir / "failure.txt").read_text()
    folder = str(session.log_dir)
    return agents.err.getvalue().replace(folder, "logs"), text.replace(folder, "logs")


def test_an_error_that_ranks_have_not_printed_is_shown_once(make: Callable[..., Agents]) -> None:
    """With the frames of the script, and all frames in the file."""
    shown, kept = report(make(), failure(0), failure(1))
    summary = (
        "rank 0 on n0 failed with exit code 1, as did rank 1; the whole traceback is in "
        "logs/rank0.log."
    )
    assert shown == (
        "[0] Traceback\n[0]   the script's frames\n"
        "[0] RankMismatchError: rank 0 of 2 on n0: the shapes differ\n"
        f"torchmn: {summary}\n"
    )
    assert kept == f"{failure(0).whole}\n{summary}\n"


def test_another_error_of_another_rank_is_in_the_summary(make: Callable[..., Agents]) -> None:
    shown, _ = report(make(), failure(0), failure(1, error="KeyError: 'x'"))
    last = shown.splitlines()[-1]
    assert "exit code 1; rank 1 failed with another error (KeyError: 'x'); the whole" in last
    assert shown.count("shapes differ") == 1


def test_what_a_hook_of_the_script_has_printed_is_not_shown(make: Callable[..., Agents]) -> None:
    shown, kept = report(make(), failure(0, is_shown=True, error="ValueError: the cause"))
    assert shown == (
        "torchmn: rank 0 on n0 failed with exit code 1 (ValueError: the cause); its output is in "
        "logs/rank0.log.\n"
    )
    assert "all frames\nValueError: the cause\n" in kept


def test_the_text_of_sys_exit_is_shown_once(make: Callable[..., Agents]) -> None:
    left = [Leaving(status=1, text="no data")] * 2
    shown, kept = report(make(), *left)
    assert shown == (
        "[0] no data\n"
        "torchmn: rank 0 on n0 failed with exit code 1, as did rank 1; its output is in "
        "logs/rank0.log.\n"
    )
    assert "no data" in kept


def test_an_error_is_shown_though_the_result_is_another(make: Callable[..., Agents]) -> None:
    """A hang that was found first, or a launcher that ended all."""
    agents = make().connect_all()
    agents.send(1, failure(1))
    agents.session.show_error(JobResult(exit_code=1, summary="mpirun ended"))
    assert "[1] RankMismatchError: rank 1 of 2" in agents.err.getvalue()


def test_the_error_that_ends_a_script_replaces_one_that_it_might_have_caught(
    make: Callable[..., Agents],
) -> None:
    agents = make()
    agents.connect(0)
    early = msgspec.structs.replace(failure(0), whole="", is_shown=True, at=0.5)
    agents.send(0, early)
    agents.send(0, failure(0))
    record, _ = agents.session.records
    assert record.is_unprinted
    assert record.failed_at == 0.5
