"""Two jobs in one checkpoint folder: the second is refused, or takes over from one that is dead."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import nn

import torchmn
from tests.limits import limit
from tests.unit.checkpoint.training import checkpointer_of, names, on_ranks, saved
from torchmn.checkpoint import folder_owner
from torchmn.checkpoint.folder_owner import OWNER, FolderOwner, Owner, this_process
from torchmn.control.codec import decode, encode
from torchmn.errors import CheckpointWarning, DataError, UsageError

OTHER_JOB = """
import sys
import torch
import torchmn

comm = torchmn.create_communicator("naive")
checkpointer = torchmn.create_multi_node_checkpointer(comm, sys.argv[1], "a run")
checkpointer.save(7, {"model": torch.nn.Linear(2, 2)})
checkpointer.finish()
print("saved", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has saved step 7 in the folder, and is alive."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_JOB, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats in tenths of a second; on a busy machine an owner is silent for longer."""
    monkeypatch.setattr(folder_owner, "PERIOD_S", 0.05)
    monkeypatch.setattr(folder_owner, "STALE_S", limit(0.4))
    monkeypatch.setattr(folder_owner, "_PAUSE_S", 0.05)


def create(path: Path, **options: Any) -> None:
    def rank_main(comm: torchmn.Communicator) -> None:
        checkpointer_of(comm, path, **options)

    on_ranks(rank_main, 2)


def leave(path: Path, **changes: Any) -> Owner:
    """A file of an owner elsewhere, as it was left."""
    owner = msgspec.structs.replace(this_process(), **{"machine": "of another host", **changes})
    (path / "a run").mkdir(exist_ok=True)
    (path / "a run" / OWNER).write_bytes(encode(owner))
    return owner


def save_and_finish(comm: torchmn.Communicator, path: Path) -> None:
    saved(comm, path, 8, {"model": nn.Linear(2, 2)})


def test_job_that_runs_and_is_killed(tmp_path: Path, other_job: subprocess.Popen[str]) -> None:
    """Refused, but for reading; after kill -9 the folder is taken over at once."""
    with pytest.raises(UsageError, match=rf"belongs to another job: .*process {other_job.pid} on"):
        create(tmp_path)

    def read(comm: torchmn.Communicator) -> int:
        checkpointer = checkpointer_of(comm, tmp_path, read_only=True)
        with pytest.raises(UsageError, match="read_only=True"):
            checkpointer.save(9, {"model": nn.Linear(2, 2)})
        return int(checkpointer.resume({"model": nn.Linear(2, 2)}))

    assert on_ranks(read, 2) == [7, 7]
    other_job.send_signal(signal.SIGKILL)
    other_job.wait()
    taken = f"taken over from process {other_job.pid} on .*, which has ended without leaving it"
    with pytest.warns(CheckpointWarning, match=taken):
        on_ranks(lambda comm: save_and_finish(comm, tmp_path), 2)
    assert names(tmp_path) == ["step-00000007", "step-00000008"]  # and no owner


def test_job_that_is_stopped_is_alive(tmp_path: Path, other_job: subprocess.Popen[str]) -> None:
    """A scheduler may suspend a job: no other takes its folder."""
    other_job.send_signal(signal.SIGSTOP)
    with pytest.raises(UsageError, match="belongs to another job"):
        create(tmp_path)


def test_job_that_ends_leaves_the_folder(tmp_path: Path, other_job: subprocess.Popen[str]) -> None:
    other_job.communicate("")
    assert names(tmp_path) == ["step-00000007"]
    create(tmp_path)


def test_two_checkpointers_of_one_process(tmp_path: Path) -> None:
    """A cell of a notebook that was run twice: the folder is owned until both are closed."""

    def rank_main(comm: torchmn.Communicator) -> bool:
        first, second = checkpointer_of(comm, tmp_path), checkpointer_of(comm, tmp_path)
        first.close()
        comm.barrier()
        is_owned = (tmp_path / "a run" / OWNER).exists()
        second.save(8, {"model": nn.Linear(2, 2)})  # with a warning if its file is gone
        second.finish()
        return is_owned

    assert on_ranks(rank_main, 2) == [True, True]
    assert names(tmp_path) == ["step-00000008"]


@pytest.mark.usefixtures("soon")
def test_owner_on_another_host_without_a_sign_of_life(tmp_path: Path) -> None:
    """Its file may be of any time: only whether it changes counts."""
    leave(tmp_path, host="n7", scheduled_as="Slurm job 12")
    future = 4_000_000_000
    os.utime(tmp_path / "a run" / OWNER, (future, future))
    with pytest.warns(CheckpointWarning) as warned:
        create(tmp_path)
    texts = [str(each.message) for each in warned]
    assert "was left in the name of Slurm job 12, process" in texts[0]
    assert f"has shown no sign of life for {limit(0.4):g} s" in texts[1]


@pytest.mark.usefixtures("soon")
def test_owner_on_another_host_that_lives(tmp_path: Path) -> None:
    leave(tmp_path, host="n7")
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.02):
            os.utime(tmp_path / "a run" / OWNER)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with (
            pytest.warns(CheckpointWarning, match="sign of life"),
            pytest.raises(UsageError, match=r"another job: process \d+ on n7"),
        ):
            create(tmp_path)
    finally:
        done.set()
        thread.join()


@pytest.mark.usefixtures("soon")
def test_file_that_says_nothing(tmp_path: Path) -> None:
    """One that is being written, or by a version to come."""
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / OWNER).write_text("{")
    with pytest.warns(CheckpointWarning, match="an unknown process"):
        create(tmp_path)


def test_later_round_of_an_elastic_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of rank 0 is lost: the others continue at once, and without a word."""
    leave(tmp_path, job="x", round=4)
    monkeypatch.setenv("TORCHMN_JOB", "x")
    monkeypatch.setenv("TORCHMN_ROUND", "5")
    create(tmp_path)
    assert names(tmp_path) == []


def test_owner_that_was_replaced_saves_nothing(tmp_path: Path) -> None:
    """A job that was suspended for so long that another one took its folder."""

    def rank_main(comm: torchmn.Communicator) -> str:
        checkpointer = saved(comm, tmp_path, 1, {"model": nn.Linear(2, 2)})
        if comm.rank == 0:
            leave(tmp_path, host="n7", pid=1234)
        comm.barrier()
        checkpointer.save(2, {"model": nn.Linear(2, 2)})
        with pytest.raises(DataError) as caught:
            checkpointer.finish()
        return str(caught.value)

    for text in on_ranks(rank_main, 2):
        assert "taken over by process 1234 on n7" in text
        assert "the checkpoint of step 2 was aborted; the newest one is step-00000001" in text
    left = decode((tmp_path / "a run" / OWNER).read_bytes(), Owner)
    assert left.pid == 1234, "the file of the successor stays"


@pytest.mark.usefixtures("soon")
def test_heartbeat(tmp_path: Path) -> None:
    def rank_main(comm: torchmn.Communicator) -> None:
        checkpointer_of(comm, tmp_path)
        path = tmp_path / "a run" / OWNER
        before = path.stat().st_mtime_ns
        while path.stat().st_mtime_ns == before:
            pass

    on_ranks(rank_main, 1)


def test_child_that_was_forked_leaves_the_owner(tmp_path: Path) -> None:
    def rank_main(comm: torchmn.Communicator) -> None:
        checkpointer = checkpointer_of(comm, tmp_path)
        pid = os.fork()
        if pid == 0:
            checkpointer._owner.release()
            os._exit(0)
        os.waitpid(pid, 0)
        assert names(tmp_path) == [OWNER]

    on_ranks(rank_main, 1)


def test_a_heartbeat_and_a_save_make_the_file_of_a_removed_folder_once(tmp_path: Path) -> None:
    """Neither thread may take what the other has not written yet for another job's."""
    both_are_here = threading.Barrier(2, timeout=limit(0.5))

    def make_slowly(path: Path, content: bytes) -> None:
        with path.open("xb") as file:
            with suppress(threading.BrokenBarrierError):
                both_are_here.wait()
            file.write(content)

    owner = FolderOwner(tmp_path, make_slowly)
    assert owner.attempt(0.0)[0] == "owned"
    both_are_here.reset()
    (tmp_path / OWNER).unlink()
    with ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(owner.confirm) for _ in range(2)]:
            call.result()
    owner.release()
