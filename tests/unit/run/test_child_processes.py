"""Signals to a launcher are seen between two turns of its loop, each at the same time by all."""

import subprocess
import sys

import pytest

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
