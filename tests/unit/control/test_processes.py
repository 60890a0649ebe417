"""Descendants are found and ended, whatever sessions and groups they make."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.limits import limit
from torchmn.base.errors import shell_code
from torchmn.control.processes import (
    StoppedProcesses,
    children,
    descendants,
    files_of,
    kill_descendants,
    signal_name,
)

TREE = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.processes
def test_descendants_are_found_and_killed_except_spared_ones() -> None:
    tree = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE)
    spared = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert tree.stdout is not None
    tree.stdout.readline()
    grandchildren = descendants(tree.pid)
    assert len(grandchildren) == 2
    assert {tree.pid, spared.pid, *grandchildren} <= set(descendants(os.getpid()))
    others = set(descendants(os.getpid())) - {tree.pid, *grandchildren}
    kill_descendants(os.getpid(), spare=others)
    assert tree.wait(limit(5)) == -signal.SIGKILL
    for pid in grandchildren:
        deadline = time.monotonic() + limit(5)
        while pid in descendants(1):
            assert time.monotonic() < deadline
    assert spared.poll() is None
    spared.kill()
    spared.wait(limit(5))
    tree.stdout.close()


@pytest.mark.processes
def test_children_that_another_thread_has_started() -> None:
    """As those of mpirun: the kernel keeps a list for each thread."""
    started: list[subprocess.Popen[bytes]] = []
    has_started, must_end = threading.Event(), threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(["sleep", "60"]))
        has_started.set()
        must_end.wait(limit(60))  # with the thread they would become those of another one

    thread = threading.Thread(target=start)
    thread.start()
    assert has_started.wait(limit(30))
    found = children(os.getpid())
    must_end.set()
    thread.join()
    started[0].kill()
    started[0].wait(limit(5))
    assert started[0].pid in found


def test_files_that_another_thread_opens_and_closes() -> None:
    """As a rank's threads do while it looks for the process that has claimed its rank."""
    must_end = threading.Event()

    def open_and_close() -> None:
        while not must_end.is_set():
            os.close(os.dup(0))

    threads = [threading.Thread(target=open_and_close) for _ in range(2)]
    kept = os.memfd_create("kept")
    for thread in threads:
        thread.start()
    try:
        assert all("/memfd:kept (deleted)" in files_of(os.getpid()) for _ in range(2000))
    finally:
        must_end.set()
        for thread in threads:
            thread.join()
        os.close(kept)


def test_shell_code_and_signal_name() -> None:
    assert [shell_code(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]
    assert [signal_name(code) for code in (0, 3, -9, -64)] == [None, None, "SIGKILL", "SIGRTMAX"]


@pytest.mark.processes
def test_has_children_until_the_last_is_reaped() -> None:
    script = """
import os, subprocess, sys
from torchmn.control.processes import has_children
assert not has_children()
process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
assert has_children()
process.stdin.close()
os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
assert has_children()
process.wait()
assert not has_children()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=limit(30))


# ---- the limit of open files of a process that is connected to all ranks ----


SCRIPT = """
import resource, subprocess, sys
from torchmn.control.processes import allow_connections, lower_in_child
from torchmn.base.errors import LaunchError

SHOW = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
soft, hard, num_connections = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    allow_connections(num_connections, "The job")
    allow_connections(num_connections, "The job")  # again: the limit that is given back stays
except LaunchError as error:
    print(error)
print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
subprocess.run([sys.executable, "-c", SHOW], preexec_fn=lower_in_child())
"""


@pytest.mark.parametrize(
    ("soft", "hard", "num_connections", "own"),
    [(128, 512, 64, "128 512"), (128, 512, 65, "512 512"), (128, 512, 448, "512 512")],
)
def test_the_limit_is_raised_where_it_must_be_and_not_for_children(
    soft: int, hard: int, num_connections: int, own: str
) -> None:
    assert limits_of(soft, hard, num_connections) == [own, f"{soft} {hard}"]


def test_a_hard_limit_that_is_too_low_is_refused_and_nothing_is_changed() -> None:
    text, own, of_child = limits_of(128, 512, 449)
    assert text.startswith("The job needs 513 open files, one for each of 449 connections and 64 ")
    assert "the hard limit of open files is 512. Raise it ('nofile' in " in text
    assert own == of_child == "128 512"


def limits_of(soft: int, hard: int, num_connections: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(soft), str(hard), str(num_connections)],
        capture_output=True,
        text=True,
        timeout=limit(50),
        check=True,
    )
    return done.stdout.splitlines()


# ---- how long processes have been stopped ----


def test_one_that_continues_is_counted_again_from_its_next_stop() -> None:
    stopped = StoppedProcesses[str]()
    for now, seen in enumerate([("a", "b"), ("a", "b"), ("b",), ("a", "b")]):
        stopped.update(seen, float(now))
    assert sorted(stopped) == ["a", "b"]
    assert stopped.for_longer_than(1.0, now=3.0) == ["b"]
    assert sorted(stopped.for_longer_than(1.0, now=4.0)) == ["a", "b"]
