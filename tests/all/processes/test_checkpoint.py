"""Processes that die, stop or leave in the middle of a save; hosts that do not share a folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from tests.limits import limit

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SCRIPT = """
import ctypes, faulthandler, json, os, resource, signal, subprocess, sys, time
import torch
from torch.distributed import FileStore
import torchmn
from torchmn.checkpoint import dcp  # whatever takes time to import
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.cluster import Topology

torch.set_num_threads(1)


def children():
    # Reads jobs and starts a process for each rank: only these return.
    for line in sys.stdin:
        job = json.loads(line)
        pids = []
        for rank in range(job["size"]):
            pid = os.fork()
            if pid == 0:
                for descriptor, name in ((1, "out"), (2, "err")):
                    opened = os.open(f"{job['folder']}/{name}{rank}", os.O_WRONLY | os.O_CREAT)
                    os.ftruncate(opened, 0)
                    os.dup2(opened, descriptor)
                faulthandler.register(signal.SIGALRM, chain=True)  # a rank that hangs says where
                signal.alarm(JOB_LIMIT_S)
                return rank, job["size"], job["folder"], job["event"]
            pids.append(pid)
        statuses = []
        for rank, pid in enumerate(pids):
            if job["event"].startswith("stops") and rank == 1:
                os.kill(pid, signal.SIGKILL)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print(json.dumps(statuses), flush=True)
    sys.exit(0)


rank, size, folder, event = children()


class Wounded:
    # The real storage of a rank that something happens to at one place of its third save.

    def __init__(self, storage):
        self.storage = storage

    def __getattr__(self, name):
        return getattr(self.storage, name)

    def write(self, draft, file, pieces):
        is_third = "00000003" in draft
        if is_third and event == "between files" and rank == 1 and file.endswith("safetensors"):
            os.kill(os.getpid(), signal.SIGKILL)
        if is_third and event == "in a file" and rank == 1 and file.endswith("safetensors"):
            first = next(iter(pieces))
            self.storage.write(draft, file, [first])
            os.kill(os.getpid(), signal.SIGKILL)
        if is_third and event.startswith("stops") and rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if is_third and event == "exit while writing":
            time.sleep(1)
        self.storage.write(draft, file, pieces)

    def commit(self, draft, checkpoint, manifest):
        if "00000003" in draft and event == "before the manifest":
            os.kill(os.getpid(), signal.SIGKILL)
        if "00000003" in draft and event == "before the rename":
            self.storage.write(draft, "manifest.json", [manifest])
            os.kill(os.getpid(), signal.SIGKILL)
        self.storage.commit(draft, checkpoint, manifest)
        if "00000003" in draft and event == "after the rename":
            os.kill(os.getpid(), signal.SIGKILL)

    def remove(self, name):
        if event == "in a removal" and name == "step-00000001":
            os.unlink(os.path.join(self.storage.folder, name, "manifest.json"))
            os.kill(os.getpid(), signal.SIGKILL)
        self.storage.remove(name)


def main():
    store = FileStore(f"{folder}/store-{event}", size)
    transport = TorchDistributedTransport(store, rank, size, timeout_s=30)
    comm = torchmn.create_communicator(
        "flat", transport=transport, topology=Topology.blocks([size]), timeout_s=LIMIT_S
    )
    if event == "own disk" and rank == 1:
        if ctypes.CDLL(None).unshare(0x00020000):
            print("cannot unshare")
            sys.exit(77)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder + "/checkpoints"], check=True)
    checkpointer = torchmn.create_multi_node_checkpointer(
        comm, folder + "/checkpoints", "run", keep=2
    )
    checkpointer._writer.storage = Wounded(checkpointer._writer.storage)
    model = torch.nn.Linear(500, 100)
    own = torch.nn.Linear(10, 10)
    state = {"model": model, "own": own}
    first = checkpointer.resume(state)
    if event == "resume":
        found = [p for m in (model, own) for p in m.parameters()]
        values = {round(v, 3) for p in found for v in p.ravel().tolist()}
        print("resumed", first, sorted(values))
        return
    for step in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
            for parameter in own.parameters():
                parameter.fill_(step + rank / 10)
        if event == "small files" and step == 3 and rank == 1:
            checkpointer.finish()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        checkpointer.save(step, state)
    if event == "exception" and rank == 1:
        raise RuntimeError("a failure of the script")
    if event not in ("exit while writing", "exception", "stops"):
        checkpointer.finish()
    print("done")


torchmn.run_main(main)
"""

Start = Callable[[str], list[tuple[int, str, str]]]


class Ancestor:
    """A process that has imported everything; the ranks of all jobs are its children."""

    def __init__(self, folder: Path) -> None:
        script = folder / "script.py"
        limits = f"LIMIT_S, JOB_LIMIT_S = {limit(4)}, {round(limit(45))}"
        script.write_text(f"{limits}\n{SCRIPT}")
        self._process = subprocess.Popen(
            [sys.executable, script],
            env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="default"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def run(self, job: dict[str, object]) -> list[int]:
        """The exit status of each rank of a job."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except BaseException:  # also the time limit of the test; the job may still be running
            self.close()
            raise

    def close(self) -> None:
        if self.is_running():
            for each in psutil.Process(self._process.pid).children():
                each.kill()
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # of a job that was not read
                pipe.close()


@pytest.fixture(scope="module")
def ancestor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ancestor]:
    """Of all tests, until a job does not complete."""
    with closing(Ancestor(tmp_path_factory.mktemp("script"))) as shared:
        yield shared


@pytest.fixture
def start(ancestor: Ancestor, tmp_path: Path) -> Iterator[Start]:
    """Runs two ranks: (exit status, output, errors) of each."""
    (tmp_path / "checkpoints").mkdir()
    own = None if ancestor.is_running() else Ancestor(tmp_path)
    usable = own or ancestor

    def run(event: str) -> list[tuple[int, str, str]]:
        statuses = usable.run({"size": 2, "event": event, "folder": str(tmp_path)})
        texts = [[(tmp_path / f"{kind}{r}").read_text() for kind in ("out", "err")] for r in (0, 1)]
        assert -signal.SIGALRM not in statuses, f"a rank hung: {texts}"
        return [(status, out, err) for status, (out, err) in zip(statuses, texts, strict=True)]

    yield run
    if own is not None:
        own.close()


# By place of a save: the rank that is killed there, and the step from which the job continues.
KILLS = {
    "between files": (1, 2),
    "in a file": (1, 2),
    "before the manifest": (0, 2),
    "before the rename": (0, 2),
    "after the rename": (0, 3),
    "in a removal": (0, 3),
}


def check_kill(start: Start, tmp_path: Path, event: str) -> None:
    """What was complete before is used, and the other rank ends with a message."""
    killed, step = KILLS[event]
    outcomes = start(event)
    assert outcomes[killed][0] == -9
    status, _, err = outcomes[1 - killed]
    assert status == 1, err
    assert "another rank was lost while" in err
    assert "Traceback" not in err
    for rank, (status, out, err) in enumerate(start("resume")):
        assert status == 0, err
        assert out.split("\n")[0] == f"resumed {step} {sorted({float(step), step + rank / 10})}"
        taken = "has ended without leaving it" in err
        assert taken == (killed == 0 and rank == 0)
        assert err.count("Warning") == taken
    if event not in ("between files", "before the rename", "in a removal"):
        return  # one of each kind will do for what is left behind
    outcomes = start("all is well")
    assert [status for status, *_ in outcomes] == [0, 0], outcomes
    left = sorted(path.name for path in (tmp_path / "checkpoints" / "run").iterdir())
    assert not [name for name in left if name.startswith(".")], "leftovers must be gone"
    assert len(left) == 2


@pytest.mark.parametrize("event", ["before the manifest", "after the rename", "in a removal"])
def test_kill_in_the_middle(start: Start, tmp_path: Path, event: str) -> None:
    check_kill(start, tmp_path, event)


@pytest.mark.parametrize("event", ["exit while writing", "exception"])
def test_end_of_the_interpreter_finishes_the_save(start: Start, tmp_path: Path, event: str) -> None:
    began_s = time.monotonic()
    outcomes = start(event)
    assert [status for status, *_ in outcomes] == [0, int(event == "exception")]
    assert time.monotonic() - began_s < limit(50)
    names = [path.name for path in (tmp_path / "checkpoints" / "run").iterdir()]
    assert sorted(names) == ["step-00000002", "step-00000003"]


def test_end_of_the_interpreter_does_not_wait_for_ever(start: Start, tmp_path: Path) -> None:
    status, out, err = start("stops")[0]
    assert "done" in out
    assert status == 0, err
    assert "another rank was lost" in err
    assert start("resume")[0][1].startswith("resumed 2")


def test_rank_that_is_stopped_ends_the_wait(start: Start, tmp_path: Path) -> None:
    status, out, err = start("stops, finish waits")[0]
    assert (status, out) == (1, "")
    assert "another rank was lost while a checkpoint was written" in err
    assert "did not complete within" in err
    assert start("resume")[0][1].startswith("resumed 2")


def test_disk_that_fails_on_one_rank(start: Start, tmp_path: Path) -> None:
    for status, _, err in start("small files"):
        assert status == 1
        assert (
            "the checkpoint of step 3 was aborted; the newest one is step-00000002: rank 1" in err
        )
        assert "File too large (errno 27)" in err
    assert start("resume")[0][1].startswith("resumed 2")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_hosts_that_do_not_share_the_folder(start: Start) -> None:
    outcomes = start("own disk")
    if outcomes[1][0] == 77:
        pytest.skip(reason="no mount namespaces here")
    for status, _, err in outcomes:
        assert status == 1, err
        assert "ranks [1] on" in err
        assert "a file system that all hosts share" in err
