"""Signals to a launcher are seen between two turns of its loop, each at the same time by all."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchmn.errors import LaunchError
from torchmn.run.child_processes import start_process
from torchmn.run.job import Command

SCRIPT = """
import os, signal, sys, time
from torchmn.run.child_processes import ProcessOwner

class Open:
    is_closed = False

owner = ProcessOwner(Open())
for name in sys.argv[1:]:
    signum = getattr(signal, name)
    os.kill(os.getpid(), signum)
    time.sleep(0.01)
    before = owner.interrupted_by
    forwarded = owner.take_signals_to_forward()
    names = [None if n is None else signal.Signals(n).name for n in (before, owner.interrupted_by)]
    print(*names, *(signal.Signals(n).name for n in forwarded))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("names", "seen"),
    [
        (["SIGTERM"], ["None SIGTERM SIGTERM"]),
        (["SIGUSR1", "SIGTERM"], ["None None SIGUSR1", "None SIGTERM SIGTERM"]),
        (["SIGTERM", "SIGINT"], ["None SIGTERM SIGTERM", "SIGTERM SIGINT"]),
        (["SIGHUP", "SIGTERM"], ["None SIGHUP", "SIGHUP SIGHUP SIGTERM"]),
    ],
)
def test_a_signal_asks_for_the_end_once_it_is_taken(names: list[str], seen: list[str]) -> None:
    """Not before: a SIGTERM that asks for the end and is not forwarded would cut the save short."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == seen


def test_a_signal_in_the_middle_of_an_order(tmp_path: Path) -> None:
    """The child reads late, so that the order does not fit into the pipe."""
    count = "import sys, time; time.sleep(0.3); print(len(sys.stdin.read()))"
    command = Command((sys.executable, "-c", count), dict(os.environ), stdin=b"x" * 1_000_000)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        process = start_process(command, tmp_path / "log")
    finally:
        signal.signal(signal.SIGALRM, before)
    os.waitpid(process.pid, 0)
    assert (tmp_path / "log").read_text() == "1000000\n"


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    command = Command((str(tmp_path / "rsh"),), {}, name="rsh to n1")
    with pytest.raises(LaunchError, match=r"rsh to n1 cannot be started: .*rsh: No such file"):
        start_process(command, tmp_path / "log")
