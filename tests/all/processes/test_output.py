"""The output of a job need not be read: a slow reader and a full disk cost output only."""

import os
import signal
import time

import pytest

from tests.all.processes.runner import Runner
from tests.limits import limit

pytestmark = pytest.mark.processes

LOUD = """
import pathlib, sys, time
for i in range(20_000):
    print(f"{i} " + "x" * 100, flush=i % 100 == 0)
pathlib.Path(f"written{rank}").touch()
"""


def written(runner: Runner) -> bool:
    return all((runner.folder / f"written{rank}").exists() for rank in range(2))


def lines_of(out: str, rank: int) -> list[str]:
    return [line.split()[1] for line in out.splitlines() if line.startswith(f"[{rank}] ")]


EVERY_LINE = [str(i) for i in range(20_000)]


def test_a_reader_that_pauses_slows_neither_job_nor_loses_a_line(runner: Runner) -> None:
    """4 MB wait: more than pipes, connections and memory take."""
    process = runner.start("-n", "2", "--backend", "gloo", runner.script(LOUD))
    runner.wait_until(lambda: written(runner), "the scripts wait for the reader", limit_s=60)
    assert process.poll() is None
    out, err = process.communicate(timeout=limit(60))
    assert process.returncode == 0, err
    for rank in range(2):
        assert lines_of(out, rank) == EVERY_LINE


def test_a_signal_ends_a_job_whose_reader_pauses(runner: Runner) -> None:
    script = runner.script(LOUD + "time.sleep(600)")
    process = runner.start("-n", "2", "--backend", "gloo", script)
    runner.wait_until(lambda: written(runner), "the scripts wait for the reader", limit_s=60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(limit(30)) == 143
    runner.wait_until_nothing_is_left()


def test_a_stopped_launcher_is_not_a_lost_host(runner: Runner) -> None:
    """For longer than a host may be silent, while ranks write more than a connection takes."""
    from torchmn.control.connection import HOST_TIMEOUT_S

    script = runner.script("import time\ntime.sleep(1)\n" + LOUD + "time.sleep(3)\n")
    process = runner.start("-n", "2", "--backend", "gloo", script)
    runner.wait_until(lambda: len(runner.processes("bootstrap.py")) == 2, "no scripts")
    process.send_signal(signal.SIGSTOP)
    runner.wait_until(lambda: written(runner), "the scripts wait for the launcher", limit_s=60)
    time.sleep(HOST_TIMEOUT_S + 2)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=limit(60))
    assert process.returncode == 0, err
    for rank in range(2):
        assert lines_of(out, rank) == EVERY_LINE


@pytest.mark.parametrize("streams", [(1,), (1, 2)])
def test_a_full_disk_under_the_output(runner: Runner, streams: tuple[int, ...]) -> None:
    def redirect() -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        for stream in streams:
            os.dup2(full, stream)

    process = runner.start(
        "-n", "2", "--backend", "gloo", runner.script("print('shown')"), preexec_fn=redirect
    )
    out, err = process.communicate(timeout=limit(30))
    assert (process.returncode, out) == (0, "")
    if streams == (1,):
        assert err.count("standard output cannot be written (No space left on device)") == 1
    assert [runner.log(rank) for rank in range(2)] == ["shown\n"] * 2


@pytest.mark.parametrize("streams", [(1,), (0, 1, 2)])
def test_closed_streams(runner: Runner, streams: tuple[int, ...]) -> None:
    script = runner.script(
        "import sys, time\n"
        "if rank == 1: time.sleep(600)  # or rank 0 may be ended before it prints\n"
        "print('shown')\n"
        "sys.exit(3)"
    )
    process = runner.start(
        *("-n", "2", "--backend", "gloo", script),
        preexec_fn=lambda: [os.close(stream) for stream in streams] and None,
    )
    _, err = process.communicate(timeout=limit(30))
    assert process.returncode == 3, err
    assert "Traceback" not in err
    assert runner.log(0) == "shown\n"
