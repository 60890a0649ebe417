"""A fixed number of hosts, on each of which the user runs one command, without ssh.

The hosts are network namespaces (`tests.netlab`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.all.processes.runner import PYTHON_PATH
from tests.all.processes.test_elastic import Run, _ends_runs, left_of
from tests.limits import limit
from tests.marks import ON_TEST_HOSTS
from tests.netlab import Lab, netlab

__all__ = ["_ends_runs"]

pytestmark = [*ON_TEST_HOSTS, pytest.mark.processes, pytest.mark.timeout(180)]
PORT = 29517
SECRET = "a secret that only the hosts know"

PLACE = """
import socket, torch, torchmn
comm = torchmn.create_communicator("naive")
total = int(comm.allreduce(torch.ones(1)))
print("place", comm.rank, comm.size, comm.intra_rank, comm.inter_rank, socket.gethostname(), total)
"""
FAILS = """
import sys, time, torch, torchmn
comm = torchmn.create_communicator("naive")
print("began", flush=True)
if comm.rank == 1:
    raise ArithmeticError("the cause")
time.sleep(600)
"""
SLEEPS = FAILS.replace("comm.rank == 1", "False")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with netlab(3, None) as made:
        yield made


def begin(
    lab: Lab, index: int, folder: Path, *words: object, secret: str = SECRET, script: str = PLACE
) -> Run:
    """The command of one host."""
    (folder / "script.py").write_text(script)
    own = folder / f"secret{index}"
    own.write_text(secret)
    own.chmod(0o600)
    command = [sys.executable, "-m", "torchmn", "run", "--log-dir", "logs", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    env |= {"TORCHMN_SECRET_FILE": str(own)} if secret else {}
    return Run(
        folder, lambda **more: lab.hosts[index].popen([*command, "script.py"], env=env, **more)
    )


def words(lab: Lab, node_rank: int, *more: object, nnodes: int = 2) -> tuple[object, ...]:
    """torchrun's, for its static rendezvous."""
    return (
        *("--nnodes", nnodes, "--node-rank", node_rank, "--master-addr", lab.hosts[0].address),
        *("--master-port", PORT, *more),
    )


def begin_both(lab: Lab, folder: Path, *more: object, script: str = SLEEPS) -> list[Run]:
    """A job of two hosts whose ranks sleep."""
    runs = [
        begin(lab, index, folder, *words(lab, index, "-n", 1, *more), script=script)
        for index in (0, 1)
    ]
    runs[0].wait_until(lambda: runs[0].text.count("began") == 2)
    return runs


def nothing_is_left(run: Run) -> None:
    deadline = time.monotonic() + limit(5)
    while left := left_of(run):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def places(run: Run) -> list[str]:
    return sorted(line.partition("place ")[2] for line in run.lines if "place " in line)


def test_ranks_follow_the_order_of_the_hosts(lab: Lab, tmp_path: Path) -> None:
    """Each host says how many ranks it has, and they may start in any order."""
    runs = [
        begin(lab, index, tmp_path, *words(lab, index, "-n", number, nnodes=3))
        for index, number in ((2, 1), (1, 1), (0, 2))
    ]
    assert [run.end() for run in runs] == [0, 0, 0], "\n".join(run.text for run in runs)
    assert places(runs[2]) == ["0 4 0 0 n0 4", "1 4 1 0 n0 4", "2 4 0 1 n1 4", "3 4 0 2 n2 4"]
    assert f"waiting at {lab.hosts[0].address}:{PORT} for the other hosts" in runs[2].text
    nothing_is_left(runs[0])


def test_the_same_words_on_all_hosts(lab: Lab, tmp_path: Path) -> None:
    """torchrun's dynamic rendezvous: the host with the address is the first one."""
    endpoint = f"--rdzv_endpoint={lab.hosts[0].address}:{PORT}"
    same = ("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=7", endpoint)
    runs = [begin(lab, index, tmp_path, *same) for index in range(2)]
    assert [run.end() for run in runs] == [0, 0], "\n".join(run.text for run in runs)
    assert places(runs[0]) == ["0 2 0 0 n0 2", "1 2 0 1 n1 2"]


def test_a_failure_on_one_host_ends_both_and_is_shown_on_the_first(
    lab: Lab, tmp_path: Path
) -> None:
    first, second = (
        begin(lab, index, tmp_path, *words(lab, index, "-n", 1), script=FAILS) for index in (0, 1)
    )
    assert first.end() == 1
    assert second.end() == 1
    assert "ArithmeticError: the cause" in first.text
    assert "rank 1 on n1 failed with exit code 1" in first.lines[-1]
    assert "restarts are used up" not in first.text
    assert "n1 is out of the job: a rank failed" in second.text
    nothing_is_left(first)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_ends_the_job(lab: Lab, tmp_path: Path, lost: int) -> None:
    runs = begin_both(lab, tmp_path)
    began = time.monotonic()
    runs[lost].process.kill()
    other = runs[1 - lost]
    assert other.end() != 0
    assert time.monotonic() - began < limit(20)
    assert "n1 was lost" in other.text or "the launcher was lost" in other.text
    nothing_is_left(other)


@pytest.mark.parametrize("interrupted", [0, 1])
def test_ctrl_c_on_one_host_ends_the_job(lab: Lab, tmp_path: Path, interrupted: int) -> None:
    runs = begin_both(lab, tmp_path)
    runs[interrupted].process.send_signal(signal.SIGINT)
    assert runs[0].end() == (130 if interrupted == 0 else 1), runs[0].text
    assert runs[1].end() == 130, runs[1].text
    if interrupted:
        assert "n1 leaves: it received SIGINT" in runs[0].text
    nothing_is_left(runs[0])


def test_a_second_ctrl_c_ends_a_host_at_once(lab: Lab, tmp_path: Path) -> None:
    """The first one leaves its ranks the time to save."""
    script = SLEEPS.replace("print(", "import signal; signal.signal(15, signal.SIG_IGN)\nprint(")
    runs = begin_both(lab, tmp_path, "--grace", 3600, script=script)
    runs[1].process.send_signal(signal.SIGINT)
    runs[0].wait_for("n1 leaves: it received SIGINT")
    time.sleep(1.0)
    assert runs[1].process.poll() is None
    runs[1].process.send_signal(signal.SIGINT)
    assert runs[1].end() == 130, runs[1].text
    for _ in range(2):
        runs[0].process.send_signal(signal.SIGINT)
    assert runs[0].end() == 130, runs[0].text
    nothing_is_left(runs[0])


def test_a_host_that_does_not_come_is_named(lab: Lab, tmp_path: Path) -> None:
    conf = ("--rdzv-conf", "join_timeout=5", "-n", 1)
    first = begin(lab, 0, tmp_path, *words(lab, 0, *conf, nnodes=3))
    second = begin(lab, 1, tmp_path, *words(lab, 1, *conf, nnodes=3))
    assert first.end() == 1
    assert "2 of 3 hosts joined (localhost, n1) within 5 s; --node-rank 2 did not" in first.text
    assert second.end() == 1
    assert "--node-rank 2 did not" in second.text


def test_two_hosts_with_the_same_place(lab: Lab, tmp_path: Path) -> None:
    first = begin(lab, 0, tmp_path, *words(lab, 0, "-n", 1))
    wrong = begin(lab, 1, tmp_path, *words(lab, 0, "-n", 1))
    assert wrong.end() == 1
    assert "has --node-rank 0: give each host another one" in wrong.text
    second = begin(lab, 1, tmp_path, *words(lab, 1, "-n", 1))
    assert [first.end(), second.end()] == [0, 0], first.text


def test_no_secret(lab: Lab, tmp_path: Path) -> None:
    for index in (0, 1):
        run = begin(lab, index, tmp_path, *words(lab, index), secret="")
        assert run.end() == 2
        assert "needs a secret that all hosts know" in run.text
        assert "TORCHMN_SECRET_FILE" in run.text


def test_restarts(lab: Lab, tmp_path: Path) -> None:
    script = FAILS.replace("if comm.rank == 1:", "import os\nif os.environ['TORCHMN_ROUND'] < '3':")
    script = script.replace("time.sleep(600)", "print('done')")
    runs = [
        begin(lab, i, tmp_path, *words(lab, i, "-n", 1, "--max-restarts", 2), script=script)
        for i in (0, 1)
    ]
    assert [run.end() for run in runs] == [0, 0], runs[0].text
    assert "restart 2 of 2" in runs[0].text
