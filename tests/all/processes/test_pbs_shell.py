"""The remote shell over `pbs_tmrsh`, whose limits a stand-in has (`tests/all/schedulers` has PBS).

The stand-in runs a program and not a line of a shell, without standard input, with its output in
the files of the job, and leaves the task running when it is killed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.all.processes.runner import wait_until
from tests.limits import limit
from torchmn.control.processes import is_running, python_module
from torchmn.run.starters.remote import PBS_SHELL

pytestmark = pytest.mark.processes

STAND_IN = """#!/bin/bash
shift
stat -c "mode %a" "${@: -1}" >>"$JOB_OUTPUT"
(cd / && exec setsid "$@" </dev/null >>"$JOB_OUTPUT" 2>&1) &
wait $!
"""


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts the shell with a command."""
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "pbs_tmrsh"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)

    def start(*words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*python_module(PBS_SHELL), "127.0.0.1", *words],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
                "JOB_OUTPUT": str(tmp_path / "job.OU"),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


def test_no_order_is_left_if_pbs_tmrsh_cannot_be_run(
    shell: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """It has the secret of the job."""
    (tmp_path / "bin" / "pbs_tmrsh").write_text("#!/no/such/shell")
    process = shell("true")
    _, err = process.communicate(timeout=limit(50))
    assert (process.returncode, b"pbs_tmrsh cannot be run: No such file" in err) == (255, True)
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_streams_exit_status_and_a_line_for_a_shell(
    shell: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = shell("read first; echo $first; cat;", "echo problem >&2; exit 7")
    out, err = process.communicate(b"order\n" + bytes(range(256)) * 1000, timeout=limit(50))
    assert (process.returncode, out) == (7, b"order\n" + bytes(range(256)) * 1000)
    assert err == b"problem\n"
    assert (tmp_path / "job.OU").read_text() == "mode 600\n"  # of the order, and nothing else
    assert not list(tmp_path.glob(".torchmn-*"))


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_signal_to_all_processes_of_the_task_does_not_reach_the_command(
    shell: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, name: str
) -> None:
    """PBS signals every process with the session of the task."""
    task = f'pkill -{name} -s "$(ps -o sid= -p $PPID | tr -d " ")"'
    process = shell(f"{task}; touch {tmp_path}/up; cat; exit 5")
    wait_until((tmp_path / "up").exists)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(b"more", timeout=limit(50))
    assert (process.returncode, out) == (5, b"more")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_the_command_ends_with_the_shell(
    shell: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, signum: signal.Signals
) -> None:
    process = shell(f"echo $$ >{tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 600")
    wait_until((tmp_path / "pid").exists)
    process.send_signal(signum)
    process.wait(limit(30))
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(pid))
    process.communicate()


def test_a_host_that_never_connects_is_named(
    shell: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    (tmp_path / "bin" / "pbs_tmrsh").write_text("#!/bin/bash\nexit 254\n")
    process = shell("true")
    _, err = process.communicate(timeout=limit(50))
    assert process.returncode == 255
    assert b"exit code 254 before 127.0.0.1 had connected" in err
    assert str(sys.executable).encode() in err
