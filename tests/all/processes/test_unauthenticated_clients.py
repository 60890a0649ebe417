"""Unauthenticated clients on the host and network of a job receive nothing and disrupt nothing.

What the listeners of torch and MPI allow them is in docs/security.md. Here they send bytes that
follow no protocol.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.all.processes.runner import PYTHON_PATH, wait_until
from tests.all.processes.test_hosts import need_mpirun, torchmn_run
from tests.limits import limit
from tests.netlab import Lab

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

TRAIN = """
import sys, time
from pathlib import Path
import torch, torchmn
folder = Path(sys.argv[1])
comm = torchmn.create_communicator("flat")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
generator = torch.Generator().manual_seed(comm.rank)
is_free = False
for step in range(40):
    if step == 20:
        (folder / f"ready{comm.rank}").touch()
    while step >= 20 and not is_free:  # small collectives continue meanwhile
        is_free = comm.bcast_obj((folder / "go").exists())
        time.sleep(0.01)
    x = torch.randn(8, 20, generator=generator)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), torch.arange(8) % 3).backward()
    optimizer.step()
if comm.rank == 0:
    print(sum(p.detach().double().sum().item() for p in model.parameters()))
"""
LOOK = """
import json, os, sys, psutil, torch, torchmn
from pathlib import Path
comm = torchmn.create_communicator("flat")
comm.allreduce(torch.ones(100_000))
secret = os.environ["TORCHMN_SECRET"].encode()
found = []
for path in Path("/proc").glob("[0-9]*/cmdline"):
    try:
        words = path.read_bytes()
    except OSError:
        continue
    if secret in words:
        found.append(words.decode(errors="replace"))
listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"]
Path(f"{sys.argv[1]}/{comm.rank}.json").write_text(json.dumps([secret.decode(), found, listening]))
comm.barrier()
"""


class Job:
    """`torchmn run` in its own folder, and a view of the ports that it opens."""

    def __init__(self, folder: Path, script: str, *options: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "script.py").write_text(script)
        words = ["run", "--log-dir", "logs", *options, "script.py", str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torchmn", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def listeners(self) -> list[tuple[int, tuple[str, int]]]:
        """The listeners of all processes of the job: (process, address)."""
        own = psutil.Process(self.process.pid)
        return [
            (process.pid, (connection.laddr.ip, connection.laddr.port))
            for process in (own, *own.children(recursive=True))
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()
        return all((self.folder / f"ready{rank}").exists() for rank in range(2))

    def finish(self) -> str:
        (self.folder / "go").touch()
        out, err = self.process.communicate(timeout=limit(60))
        assert self.process.returncode == 0, err
        return out


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(script: str, *options: str) -> Job:
        jobs.append(Job(tmp_path / f"job{len(jobs)}", script, *options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.process.terminate()
        job.process.communicate(timeout=limit(30))


def test_training_is_not_disrupted(start: Callable[..., Job]) -> None:
    undisturbed, job = [start(TRAIN, "-n", "2", "--backend", "gloo") for _ in range(2)]
    wait_until(lambda: undisturbed.is_ready() and job.is_ready())
    expected = undisturbed.finish()
    listeners = [address for _, address in job.listeners()]
    assert len(listeners) > 3  # the supervisor, torch's store, gloo
    assert {host for host, _ in listeners} == {"127.0.0.1"}
    with contextlib.ExitStack() as held:
        for address in listeners:
            for words in (b"", os.urandom(5000), bytes(5000), b"GET / HTTP/1.1\r\n\r\n"):
                for _ in range(5):
                    client = socket.create_connection(address, timeout=limit(20))
                    held.enter_context(client)
                    with contextlib.suppress(OSError):
                        client.sendall(words)
        assert job.finish() == expected


def looked(folder: Path) -> list[tuple[str, list[str], list[str]]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def raise_if_disclosed(secret: str, folder: Path, *texts: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.parent.parent.name == "logs":
            assert secret not in path.read_text(errors="replace"), path
    for text in texts:
        assert secret not in text


def test_the_secret_is_in_no_command_line_and_no_file(start: Callable[..., Job]) -> None:
    job = start(LOOK, "-n", "2", "--backend", "gloo")
    out, err = job.process.communicate(timeout=limit(90))
    assert job.process.returncode == 0, err
    for secret, found, listening in looked(job.folder):
        assert len(secret) == 64
        assert found == []
        assert set(listening) == {"127.0.0.1"}
        raise_if_disclosed(secret, job.folder, out, err)


@pytest.mark.root
@pytest.mark.parametrize("launcher", ["ssh", "mpirun"])
def test_between_hosts_ranks_listen_on_the_interface_that_connects_them(
    lab: Lab, tmp_path: Path, launcher: str
) -> None:
    """And the secret is in no command line of any host: they share one process table."""
    if launcher == "mpirun":
        need_mpirun()
    (tmp_path / "script.py").write_text(LOOK)
    words = ("--hosts", "n0:1,n1:1", "--launcher", launcher, "--backend", "gloo", "script.py")
    done = torchmn_run(lab, *words, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for host, (secret, found, listening) in zip(lab.hosts, looked(tmp_path), strict=True):
        assert len(secret) == 64
        assert found == []
        assert set(listening) == {host.address}
        raise_if_disclosed(secret, tmp_path, done.stdout, done.stderr)
