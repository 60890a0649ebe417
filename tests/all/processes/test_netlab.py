"""Test hosts: they reach each other at the link's rate, count bytes, and are always removed."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.all.processes.runner import PYTHON_PATH, wait_until
from tests.all.processes.test_hosts import need_mpirun
from tests.limits import limit
from tests.netlab import Host, Lab, missing_requirement, netlab
from tests.netlab.cleanup import OPEN, processes_inside, running_labs, sweep
from torchmn.errors import LaunchError

pytestmark = [pytest.mark.processes, pytest.mark.root]

RECEIVE = """
import socket, sys, time
server = socket.create_server(("", 5000))
print("ready", flush=True)
connection, peer = server.accept()
total = 0
start = None
while chunk := connection.recv(1 << 20):
    start = start or time.monotonic()
    total += len(chunk)
print(peer[0], total, time.monotonic() - start)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
OWNER = """
import json, os, sys, time
from tests.netlab import netlab
with netlab(2) as lab:
    inside = [
        lab.hosts[0].popen(["sleep", "1000"]).pid,
        lab.hosts[1].popen(["setsid", "sleep", "1000"]).pid,
    ]
    child = os.fork()  # holds every pipe of the owner open
    if child == 0:
        time.sleep(1000)
    report = {
        "folder": str(lab.folder),
        "supervisor": lab.supervisor.pid,
        "inside": inside,
        "child": child,
    }
    print(json.dumps(report), flush=True)
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def _labs_of_this_test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other labs stand on this machine is no business of these tests, nor theirs of them."""
    if reason := missing_requirement():
        pytest.skip(reason=reason)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def lab() -> Iterator[Lab]:
    with netlab(2, "100mbit") as made:
        yield made


def python(*words: object) -> list[str]:
    return [sys.executable, "-S", "-c", *map(str, words)]


def with_sources() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}


def transfer(source: Host, target: Host, num_bytes: int) -> tuple[str, float]:
    """Send bytes from one host to another by its name: the sender's address, bytes per second."""
    with target.popen(python(RECEIVE), stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        source.run(python(SEND, target.name, num_bytes))
        peer, total, seconds = receiver.stdout.read().split()
    assert int(total) == num_bytes
    return peer, num_bytes / float(seconds)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_rate_and_counters(lab: Lab) -> None:
    source, target = lab.hosts
    num_bytes = 4_000_000
    before = [(lab.bytes_sent(host), lab.bytes_received(host)) for host in lab.hosts]
    _, shaped = transfer(source, target, num_bytes)
    after = [(lab.bytes_sent(host), lab.bytes_received(host)) for host in lab.hosts]
    lab.set_rate(None)
    _, unshaped = transfer(source, target, num_bytes)

    rate = 12.5e6
    assert unshaped > 3 * rate
    # The first 128 KB of 4 MB come in a burst, and headers take 4 percent of the rate.
    assert 0.5 * rate < shaped < 1.05 * rate

    (source_sent, source_received), (target_sent, target_received) = (
        (new[0] - old[0], new[1] - old[1]) for old, new in zip(before, after, strict=True)
    )
    assert source_sent == pytest.approx(num_bytes, rel=0.02)
    assert source_sent > num_bytes
    # Each end of the switch drops what does not fit, so the second may count a little less.
    assert target_received == pytest.approx(source_sent, rel=0.02)
    assert target_sent == source_received < 0.05 * num_bytes


# Cleaning up


def test_gone_after_the_block() -> None:
    with netlab(2) as lab:
        command = ["sh", "-c", "setsid sleep 1000 & echo $!; exec sleep 1000"]
        process = lab.hosts[0].popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        process.stdout.close()
        assert {process.pid, orphan} <= set(processes_inside(lab.folder))
    assert process.returncode == -signal.SIGKILL
    assert lab.supervisor.returncode == 0
    assert is_gone(orphan)
    assert not lab.folder.exists()
    with pytest.raises(LaunchError):
        lab.bytes_sent(lab.hosts[0])
    lab.close()  # again


def test_a_lab_that_is_being_taken_down_cannot_be_entered(lab: Lab, tmp_path: Path) -> None:
    (lab.folder / OPEN).unlink()
    assert lab.hosts[0].run(["touch", tmp_path / "came"], check=False).returncode == 1
    entered = subprocess.run([lab.rsh_agent, "n1", f"touch {tmp_path}/came"])
    assert entered.returncode == 255
    assert not (tmp_path / "came").exists()


class Owned:
    """A lab of another process, with a process on each host."""

    def __init__(self) -> None:
        self.owner = subprocess.Popen(
            [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=with_sources()
        )
        assert self.owner.stdout is not None
        with self.owner.stdout as output:
            report = json.loads(output.readline())
        self.folder = Path(report["folder"])
        self.supervisor, self.inside = report["supervisor"], report["inside"]
        self.child = report["child"]

    def kill(self) -> None:
        self.owner.kill()
        self.owner.wait()

    def is_gone(self) -> bool:
        return not self.folder.exists() and all(map(is_gone, [self.supervisor, *self.inside]))


@pytest.fixture
def owned() -> Iterator[Owned]:
    made = Owned()
    yield made
    made.kill()
    for pid in (made.supervisor, made.child, *made.inside):
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: is_gone(pid))  # type: ignore[misc]


def test_gone_after_kill_9_of_the_owner(owned: Owned) -> None:
    wait_until(lambda: sorted(processes_inside(owned.folder)) == sorted(owned.inside))
    owned.kill()
    wait_until(owned.is_gone)


def test_swept_up_after_kill_9_of_owner_and_supervisor(owned: Owned, lab: Lab) -> None:
    assert sweep() == []  # both live
    os.kill(owned.supervisor, signal.SIGKILL)
    owned.kill()
    wait_until(lambda: is_gone(owned.supervisor))
    wait_until(lambda: sorted(processes_inside(owned.folder)) == sorted(owned.inside))
    with netlab(1):
        assert owned.is_gone()
        assert lab.folder.exists()
        transfer(*lab.hosts, 1000)  # the living one is untouched


# As a command


def netlab_command(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.netlab", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=with_sources(),
    )


def test_up_runs_until_it_is_ended(lab: Lab) -> None:
    with netlab_command("up", "3", "--rate", "none", "--cores", "0") as up:
        assert up.stdout is not None
        first = [up.stdout.readline() for _ in range(5)]
        assert [line.split() for line in first[:3]] == [
            [f"n{i}", f"10.78.0.{i + 1}", "no", "limit"] for i in range(3)
        ]
        assert first[3] == "\n"
        (running,) = (each for each in running_labs() if each.persistent)
        agent = first[4].split()[-3]
        assert agent == str(running.folder / "enter")
        entered = subprocess.run([agent, "n2", "hostname"], capture_output=True, text=True)
        assert entered.stdout == "n2\n"
        with netlab_command("down") as down:
            output, _ = down.communicate(timeout=limit(10))
        assert output == "Ended 1 labs, removed 0 of dead owners.\n"
        _, errors = up.communicate(timeout=limit(10))
    assert (up.returncode, errors) == (0, "")
    assert not running.folder.exists()
    assert lab.folder.exists()


def run_under_mpi(lab: Lab, script: Path) -> str:
    """What a script prints under mpirun, one rank on each host."""
    done = lab.hosts[0].run(
        [need_mpirun(), "--allow-run-as-root", "-n", "2", "--hostfile", lab.hostfile()]
        + ["--prtemca", "plm_ssh_agent", lab.rsh_agent, "--prefix", sys.prefix]
        + ["-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", sys.executable, script],
        env=with_sources(),
    )
    return done.stdout


AUTO = """
import torchmn
comm = torchmn.create_communicator("auto")
print(comm.rank, comm.name, comm.bcast_obj({1, comm.rank + 2}), comm.settings["transport"])
"""


@pytest.mark.mpi
def test_auto_under_mpi_connects_hosts_by_tcp(tmp_path: Path) -> None:
    need_mpirun()
    script = tmp_path / "rank.py"
    script.write_text(AUTO)
    with netlab(2, "1gbit") as lab:
        rows = sorted(run_under_mpi(lab, script).splitlines())
    assert rows == [f"{rank} hierarchical {{1, 2}} tcp" for rank in range(2)]
