"""Signals by which a scheduler announces the end: once to the script, and time to save."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.all.processes.runner import PYTHON_PATH, Runner
from tests.limits import limit

pytestmark = pytest.mark.processes

SAVING = """
import pathlib, signal, sys, time
received = []
save_s = float(sys.argv[1])
for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, lambda signum, frame: received.append(signal.Signals(signum).name))
print("ready", flush=True)
while not received:
    time.sleep(0.01)
until = time.monotonic() + save_s
while time.monotonic() < until:
    time.sleep(0.01)
pathlib.Path(f"received{rank}").write_text(" ".join(received))
sys.exit(85)
"""


def start(runner: Runner, *options: str, script: str = SAVING) -> subprocess.Popen[str]:
    *options_of_run, save_s = options
    process = runner.start("-n", "2", *options_of_run, runner.script(script), save_s)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)]
    return process


def received(folder: Path) -> list[str]:
    return [(folder / f"received{rank}").read_text() for rank in range(2)]


def signal_agents(runner: Runner, name: str) -> None:
    """Send a signal to the parents of the scripts."""
    pids = {script.ppid() for script in runner.processes("bootstrap.py")}
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, getattr(signal, name))


def test_a_signal_to_every_agent_and_to_the_launcher_reaches_the_script_once(
    runner: Runner,
) -> None:
    """As a scheduler sends it, to the step and to the batch script."""
    process = start(runner, "--backend", "gloo", "1.0")
    signal_agents(runner, "SIGUSR1")
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=limit(30))
    assert process.returncode == 85, err
    assert received(runner.folder) == ["SIGUSR1", "SIGUSR1"]


def test_a_save_longer_than_the_grace_is_cut_with_a_message(runner: Runner) -> None:
    process = start(runner, "--backend", "gloo", "--grace", "0.5", "600")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=limit(30))
    assert process.returncode == 143
    assert "the ranks have as long as --grace, 0.5 s to save" in err
    assert err.count("it had not exited 0.5 s after SIGTERM and is killed. Raise --grace") == 2
    assert err.splitlines()[-1].endswith("ranks 0, 1 had not exited in time and were killed.")
    runner.wait_until_nothing_is_left()


def test_inside_of_a_scheduler_a_save_takes_as_long_as_that_gives(runner: Runner) -> None:
    """Longer than the grace of a job that fails, which is cut to a moment here."""
    runner.script(SAVING)
    starter = f"""
import os
from pathlib import Path
from torchmn.run.job import Job
from torchmn.run.start import run_job
job = Job(argv=({sys.executable!r}, "script.py", "1"), num_ranks=1, backend="gloo",
          log_dir=Path("logs"), grace_s=0.1, signal_grace_s=float("inf"))
raise SystemExit(run_job(job, os.environ))
"""
    process = runner.start_python("-c", starter)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=limit(30))
    assert process.returncode == 85, err
    assert "as long as the scheduler gives" in err


def test_the_ranks_of_an_elastic_job_save(runner: Runner) -> None:
    process = start(runner, "--backend", "gloo", "--elastic", "1:1", "0.5")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=limit(60))
    assert process.returncode == 85, err
    assert received(runner.folder) == ["SIGTERM", "SIGTERM"]
    runner.wait_until_nothing_is_left()


EARLY = """
import pathlib, signal, sys, time
pathlib.Path(f"started{rank}").touch()
while not pathlib.Path("sent").exists():
    time.sleep(0.01)
received = []
signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
while not received:
    time.sleep(0.01)
sys.exit(85)
"""


def test_a_warning_before_the_script_handles_it_is_held(runner: Runner) -> None:
    process = runner.start("-n", "2", "--backend", "gloo", runner.script(EARLY))
    runner.wait_until(
        lambda: all((runner.folder / f"started{rank}").exists() for rank in range(2)), "no start"
    )
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.3)
    (runner.folder / "sent").touch()
    _, err = process.communicate(timeout=limit(30))
    assert process.returncode == 85, err


EARLY_INTERRUPT = """
import os, signal, sys
if "bootstrap.py" in " ".join(sys.orig_argv):
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_while_python_starts_shows_nothing_of_ours(runner: Runner) -> None:
    """It waits until the script could begin, and then nothing of it runs."""
    early = runner.folder / "early"
    early.mkdir()
    (early / "sitecustomize.py").write_text(EARLY_INTERRUPT)
    script = runner.script('print("has begun")')
    path = os.pathsep.join([str(early), PYTHON_PATH])
    done = runner.run("-n", "1", "--backend", "gloo", "-x", f"PYTHONPATH={path}", script)
    assert done.returncode == 130, done.stderr
    assert "begun" not in done.stdout
    assert "Traceback" not in done.stderr
    assert "bootstrap" not in done.stderr
