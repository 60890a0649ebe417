"""A rank belongs to one process, and what that starts is told so. Real processes, without torch."""

import os
import subprocess
import sys

import pytest

from tests.limits import limit
from torchmn.cluster.launcher_env import LAUNCHERS
from torchmn.control.rank_claim import claimed_by

BEGIN = """
import os, subprocess, sys, time
from torchmn.cluster.launcher_env import read_launcher_env
from torchmn.control.rank_claim import claim_rank, claimed_by
from torchmn.errors import UsageError

def claim():
    try:
        claim_rank(read_launcher_env(os.environ), os.environ)
        return "claimed"
    except UsageError as error:
        return str(error)
"""
CHILD = f"{BEGIN}\nprint(claim())"
RANK_0 = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
MPI_RANK_0 = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "j@1"}
STARTED = "was started by rank 0 of a job (process {})"
START_CHILD = """
def child(*removed, **changed):
    env = {name: text for name, text in {**os.environ, **changed}.items() if name not in removed}
    command = [sys.executable, "-c", sys.argv[1]]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
"""


def run(text: str, env: dict[str, str]) -> list[str]:
    """The lines that a program prints which runs ``text`` in such an environment."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not any(name in (*row.rank, *row.size) for row in LAUNCHERS)
    }
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + START_CHILD + text, CHILD],
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=limit(30),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("env", [RANK_0, MPI_RANK_0], ids=["torchrun", "Open MPI"])
def test_a_program_that_a_rank_starts_is_told(env: dict[str, str]) -> None:
    pid, own, again, told = run(
        "print(os.getpid()); print(claim()); print(claim())\nprint(child())", env
    )
    assert (own, again) == ("claimed", "claimed")
    assert STARTED.format(pid) in told
    assert "torchmn run -n 1 SCRIPT" in told
    assert f"unset {' '.join(list(env)[:2])};" in told


def test_other_variables_are_another_rank() -> None:
    """As those of a torchrun or an mpirun that a rank starts."""
    text = "print(claim()); print(child(MASTER_PORT='1')); print(child(RANK='1'))"
    assert run(text, RANK_0) == ["claimed"] * 3


def test_a_program_that_only_starts_the_script_is_no_rank() -> None:
    """As a shell script or a wrapper does: whoever joins is the rank, one after the other."""
    assert run("print(child()); print(child())", RANK_0) == ["claimed"] * 2


def test_two_programs_of_one_wrapper_cannot_both_be_the_rank() -> None:
    text = """
first = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1] + "; sys.stdout.flush(); sys.stdin.read()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
)
print(first.stdout.readline().strip(), first.pid)
print(child())
first.communicate()
print(child())
"""
    first, told, last = run(text, RANK_0)
    assert first.startswith("claimed ")
    assert STARTED.format(first.split()[1]) in told
    assert last == "claimed"


def test_a_forked_child_is_told_and_what_it_leaves_behind_holds_nothing() -> None:
    text = """
forked = os.fork()
if forked == 0:
    claim()  # as the rank; its own child inherits the open file and outlives it
    if os.fork():
        time.sleep(0.1)
        os._exit(0)
    time.sleep(60)
os.waitpid(forked, 0)
from torchmn.control.processes import descendants
print(claim())
if os.fork() == 0:
    print(claim(), flush=True)
    os._exit(0)
os.wait()
"""
    reaper = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
    end = "for pid in descendants(os.getpid()): os.kill(pid, 9)"
    own, told = run(f"{reaper}{text}{end}", RANK_0)
    assert own == "claimed"
    assert "was started by rank 0 of a job" in told


def test_a_rank_alone_claims_nothing() -> None:
    alone = {**RANK_0, "WORLD_SIZE": "1"}
    assert run("print(claim()); print(child())", alone) == ["claimed"] * 2


def test_without_a_launcher_nothing_is_claimed() -> None:
    assert claimed_by({}) is None
