"""Inspecting a job: who may, what is answered, and that the job goes on as before."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.limits import limit
from tests.unit.run.monitor.test_rank_session import NUM_RANKS, Listener, ended, wait
from torchmn.control.codec import decode, encode
from torchmn.control.connection import Channel
from torchmn.control.hang_report import report_of_inspection
from torchmn.control.messages import (
    CollectiveStatus,
    EngineStatus,
    Inspection,
    Overdue,
    ProcessState,
    StatusReply,
    StatusRequest,
)
from torchmn.errors import LaunchError
from torchmn.run.monitor.inspections import (
    INSPECT_FILE,
    Inspections,
    Inspector,
    _default,
    inspect,
)
from torchmn.run.monitor.rank_session import RankSession

STACKS = 'MainThread:\n  File "/home/me/train.py", line 17, in main\n    time.sleep(100)'


class Job:
    """A session with ranks, which turns its loop until a client has its answer."""

    def __init__(self, folder: Path) -> None:
        listener: Any = Listener()
        self.listener: Listener = listener
        self.session = RankSession(listener, NUM_RANKS, folder)
        self.folder = folder
        self.session.inspections = self.inspections = Inspections(folder)
        self.peers = [self.listener.connect(rank) for rank in range(NUM_RANKS)]
        wait(self.session, 5.0)

    def turn(self) -> None:
        wait(self.session, 0.01)
        self.session.clock.tick()

    def inspect(self, answer: Callable[[int, Channel], None]) -> Inspection:
        """The answer to a client in a thread; ``answer`` is called for each rank that is asked."""
        found: list[Inspection | BaseException] = []

        def ask() -> None:
            try:
                found.append(inspect(self.folder))
            except BaseException as error:
                found.append(error)

        client = threading.Thread(target=ask)
        client.start()
        while client.is_alive():
            self.turn()
            for rank, peer in enumerate(self.peers):
                if any(isinstance(each, StatusRequest) for each in peer.collect()):
                    answer(rank, peer)
        client.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def close(self) -> None:
        self.session.close()
        self.inspections.close()
        for peer in self.peers:
            peer.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    found = Job(tmp_path / "run")
    yield found
    found.close()


def replying(rank: int, peer: Channel) -> None:
    """Rank 1 sleeps, and all others wait in an all-reduce."""
    state, number = ("done", 4) if rank == 1 else ("running", 5)
    own = CollectiveStatus(group="world", number=number, what="all_reduce", state=state, age_s=7.0)
    peer.post(
        StatusReply(
            collectives=(own,),
            recent=(own,),
            engines=(EngineStatus(is_running=rank != 1, num_queued=2, num_on_device=0),),
            rss_nbytes=1_500_000_000,
            stacks=STACKS,
            script_stack=STACKS,
        )
    )


def test_all_ranks_are_shown_and_for_whom_they_wait(job: Job) -> None:
    found = job.inspect(replying)
    assert [state.rank for state in found.ranks] == [*range(NUM_RANKS)]
    assert all(state.reply is not None and state.host == "n" for state in found.ranks)
    text = report_of_inspection(found, is_full=False)
    title, cause, *lines = text.splitlines()
    assert title.startswith(f"{job.folder}: 5 ranks on 1 host, running for ")
    assert cause.startswith("all_reduce of group 'world' began 7 s ago; rank 1 did not reach it: ")
    assert "rank 1 on n runs at /home/me/train.py:17 in main" in cause
    assert lines.count("    time.sleep(100)") == 0
    assert text.count("time.sleep(100)") == NUM_RANKS
    assert text.count("1.50 GB of memory") == NUM_RANKS
    assert "  exchanges: 1 running, 2 queued, 0 on a GPU" in lines
    assert "  exchanges: 0 running, 2 queued, 0 on a GPU" in lines


def test_a_rank_that_holds_the_gil_is_described_by_its_agent(job: Job) -> None:
    def answer(rank: int, peer: Channel) -> None:
        busy = StatusReply(process=ProcessState.RUNNING, rss_nbytes=10**9)
        peer.post(busy if rank == 1 else StatusReply(stacks=STACKS))

    text = report_of_inspection(job.inspect(answer), is_full=True)
    assert "rank 1 on n does not answer: its process runs; it is in C code that holds" in text
    assert "1.00 GB of memory" in text


def test_ranks_that_have_ended_or_do_not_answer(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the first, and not long for the others."""
    detector = job.session.detector
    monkeypatch.setattr(type(detector), "replies_limit_s", property(lambda _: 0.3))
    job.peers[0].post(ended(0))
    job.turn()

    def answer(rank: int, peer: Channel) -> None:
        if rank > 1:
            replying(rank, peer)

    text = report_of_inspection(job.inspect(answer), is_full=False)
    assert "rank 0 on n has ended with exit code 0" in text
    assert "rank 1 on n: no answer, neither from the rank nor from its agent." in text


def test_agents_that_wait_for_their_order_are_not_asked(job: Job) -> None:
    """They expect nothing else, and would give up."""
    job.session.has_started = False
    found = job.inspect(lambda rank, peer: pytest.fail("asked"))
    assert {state.text for state in found.ranks} == {"has not started yet"}


def test_a_hang_is_reported_from_replies_of_its_own(job: Job) -> None:
    """Those of an inspection may be of long ago."""
    job.inspect(replying)
    assert job.session.records[0].status_reply is not None
    job.peers[0].post(Overdue(group="world", number=5, limit_s=1.0))
    job.turn()
    assert not job.session.must_end(job.session.clock.now)
    job.turn()
    for rank, peer in enumerate(job.peers):
        assert any(isinstance(each, StatusRequest) for each in peer.collect())
        replying(rank, peer)
    job.turn()
    assert job.session.must_end(job.session.clock.now)
    assert job.session.detector.hang is not None
    assert job.session.detector.hang.missing == (1,)
    # and who looks while the job ends disturbs nothing
    found = job.inspect(lambda rank, peer: pytest.fail("asked again"))
    assert found.ranks[1].reply is not None


def test_several_people_look_at_once(job: Job) -> None:
    found: list[Inspection] = []
    others = [threading.Thread(target=lambda: found.append(inspect(job.folder))) for _ in range(3)]
    for each in others:
        each.start()
    found.append(job.inspect(replying))
    while any(each.is_alive() for each in others):
        job.turn()
        for rank, peer in enumerate(job.peers):
            if any(isinstance(each, StatusRequest) for each in peer.collect()):
                replying(rank, peer)
    assert len(found) == 4
    assert all(state.reply is not None for each in found for state in each.ranks)


def test_the_file_is_private_and_has_its_own_secret(job: Job) -> None:
    path = job.folder / INSPECT_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o640)
    with pytest.raises(LaunchError, match="has mode 640"):
        inspect(job.folder)
    path.chmod(0o600)
    own = decode(path.read_bytes(), Inspector)
    assert own.address.startswith("127.0.0.1:")
    path.write_bytes(encode(msgspec.structs.replace(own, secret="guessed")))
    with pytest.raises(LaunchError, match="does not answer"):
        job.inspect(lambda rank, peer: pytest.fail("asked"))


def test_a_job_that_has_ended(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    (job.folder / "job.json").write_text("{}")
    job.close()
    assert not (job.folder / INSPECT_FILE).exists()
    with pytest.raises(LaunchError, match="has ended: there is nothing to inspect"):
        inspect(job.folder)
    (tmp_path / "latest").symlink_to(job.folder.name)
    with pytest.raises(LaunchError, match="has ended"):
        inspect(tmp_path)


def test_a_folder_that_has_nothing_else_is_removed(tmp_path: Path) -> None:
    """That of the monitor server, which otherwise writes only if the job fails."""
    Inspections(tmp_path / "run").close()
    assert not (tmp_path / "run").exists()


def test_a_job_whose_launcher_was_killed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(limit(20))
    own = Inspector(
        address="127.0.0.1:1", secret="x", host=socket.gethostname(), pid=gone.pid, started="5"
    )
    path = tmp_path / INSPECT_FILE
    path.touch(mode=0o600)
    path.write_bytes(encode(own))
    with pytest.raises(LaunchError, match=f"the process {gone.pid} that followed it was killed"):
        inspect(tmp_path)
    path.write_bytes(encode(msgspec.structs.replace(own, host="elsewhere")))
    with pytest.raises(LaunchError, match="was started on elsewhere"):
        inspect(tmp_path)


def test_no_job(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="it does not exist"):
        inspect(tmp_path / "none")
    with pytest.raises(LaunchError, match="it has no job.json"):
        inspect(tmp_path)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user as well")
def test_a_run_of_another_user(tmp_path: Path) -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(LaunchError, match="not yours to read: name a run of your own"):
            inspect(tmp_path / "run")
    finally:
        os.seteuid(0)


def test_the_newest_job_below_this_folder_is_the_default(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those of processes of this user, which have the file open."""
    other = Inspections(job.folder.parent / "other")
    monkeypatch.chdir(job.folder.parent)
    os.utime(job.folder / INSPECT_FILE, (2e9, 2e9))  # in the future, so that it is this one
    folder, job.folder = job.folder, None  # type: ignore[assignment]
    try:
        found = job.inspect(replying)
    finally:
        job.folder = folder
        other.close()
    assert found.log_dir == str(folder)


def test_of_several_jobs_elsewhere_none_is_the_default(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/sys")
    folders = [job.folder, job.folder.parent / "other job"]
    other = Inspections(folders[1])
    os.utime(folders[0] / INSPECT_FILE, (2e9, 2e9))
    listed = [str(folder / INSPECT_FILE) for folder in folders]
    monkeypatch.setattr("torchmn.run.monitor.inspections.open_files", lambda name: listed)
    text = f"first:\n  torchmn inspect {folders[0]}\n  torchmn inspect '{folders[1]}'"
    try:
        with pytest.raises(LaunchError, match=re.escape(text)):
            _default()
    finally:
        other.close()
    listed.pop()
    assert _default() == job.folder


def test_a_job_that_ends_while_jobs_are_looked_for(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, here = job.folder / "ended" / INSPECT_FILE, job.folder / INSPECT_FILE
    listed = "torchmn.run.monitor.inspections.open_files"
    monkeypatch.setattr(listed, lambda name: [str(gone), str(here)])
    monkeypatch.setattr(Path, "exists", lambda self: True)  # it was there a moment ago
    assert _default() == job.folder
    monkeypatch.setattr(listed, lambda name: [str(gone)])
    with pytest.raises(LaunchError, match="No job of yours that can be inspected runs"):
        _default()
