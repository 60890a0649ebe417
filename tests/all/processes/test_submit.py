"""`torchmn submit --wait` end to end, with a stand-in for PBS and the real `torchmn run`.

`tests/all/schedulers` has real schedulers, `tests/unit/submit` everything that a script holds.
"""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import torchmn
from tests.all.processes.runner import PYTHON_PATH, run

pytestmark = pytest.mark.processes

# A job has the environment of a login on a compute node, and not that of the submission.
QSUB = """
number=$(($(ls {state} | grep -c started) + 1))
touch {state}/$number.started
for script; do :; done
env -i PATH={bin}:/usr/bin:/bin HOME={state} PBS_ENVIRONMENT=PBS_BATCH PBS_JOBID=$number.stand-in \
  PBS_O_WORKDIR="$PWD" PBS_NODEFILE={state}/nodes \
  sh -c 'cd && bash "$0"; echo $? >{state}/new && mv {state}/new {state}/$1.ended' \
  "$PWD/$script" $number </dev/null >/dev/null 2>&1 &
echo $number.stand-in
"""
QSTAT = """
for job; do :; done
ended={state}/${{job%%.*}}.ended
echo "Job Id: $job"
if [ -e $ended ]; then
  echo "    job_state = F"
  echo "    Exit_status = $(cat $ended)"
else
  echo "    job_state = R"
fi
"""
SAVES_ONCE = """
import os, pathlib, sys, time
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])

def leave(name, status):
    marks = [pathlib.Path(f"{name}-by-{each}") for each in (0, 1)]
    marks[rank].touch()
    while not all(mark.exists() for mark in marks):  # who leaves first has the other ended
        time.sleep(0.01)
    sys.exit(status)

if not pathlib.Path(f"saved-by-{rank}").exists():
    pathlib.Path(os.environ["TORCHMN_PROGRESS_FILE"]).write_text("exit: a test\\n")
    leave("saved", 85)
assert "ONLY_AT_LOGIN" not in os.environ
print("done by rank", rank, sys.argv[1:], os.environ["A"], flush=True)
leave("done", 3)
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


def submit(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    path = f"PATH={folder / 'bin'}:/usr/bin:/bin"
    env = (path, f"HOME={folder}", f"PYTHONPATH={PYTHON_PATH}", "ONLY_AT_LOGIN=1")
    command = (sys.executable, "-m", "torchmn", "submit", "--scheduler", "pbs", *args)
    return run("env", "-i", *env, *command, cwd=folder, limit_s=90)


def test_a_job_saves_continues_in_a_second_one_and_its_exit_status_is_ours(tmp_path: Path) -> None:
    """One node, this machine."""
    state, node_bin = tmp_path / "state", tmp_path / "venv" / "bin"
    node_bin.mkdir(parents=True)
    state.mkdir()
    (state / "nodes").write_text(f"{socket.gethostname()}\n" * 2)
    for name, text in (("qsub", QSUB), ("qstat", QSTAT), ("pbsnodes", "")):
        program(tmp_path / "bin" / name, text.format(state=state, bin=tmp_path / "bin"))
    python = f'exec "{sys.executable}"'
    program(node_bin / "python3", f'{python} "$@"\n')
    program(node_bin / "torchmn", f'PYTHONPATH="{PYTHON_PATH}" {python} -m torchmn "$@"\n')
    (node_bin / "activate").write_text(f'PATH="{node_bin}:$PATH"\nexport PATH\n')
    (tmp_path / "train.py").write_text(SAVES_ONCE)
    asked = ("--per-node", "2", "--threads", "1", "--join-output", "--activate", "venv")
    asked += ("--name", "saving", "-x", "A=b", "--requeue", "--wait", "train.py", "--epoch", "a b")
    done = submit(tmp_path, *asked)
    assert done.returncode == 3, (done.stdout, done.stderr)
    script = (tmp_path / "saving.pbs.sh").read_text()
    assert done.stdout.startswith(script)  # it is shown as it is submitted
    assert "job 1.stand-in; its output goes to torchmn-logs/saving.*" in done.stderr
    output = done.stdout.removeprefix(script)
    for rank in range(2):
        assert f"[{rank}] done by rank {rank} ['--epoch', 'a b'] b\n" in output
    assert re.findall(r"resubmitted as (\S+)", output) == ["2.stand-in"]
    assert f"torchmn {torchmn.__version__}" in output
    assert output.endswith("torchmn: job ended with exit status 3\n")
    folders = [path for path in tmp_path.glob("torchmn-logs/saving.*") if path.is_dir()]
    assert len(folders) == 2
    assert all((folder / "latest/rank1.log").exists() for folder in folders)


def test_nothing_is_submitted_in_a_dry_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = submit(tmp_path, "--dry-run", "--output", "job.sh", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n")
    assert (tmp_path / "job.sh").read_text() == done.stdout
    assert (tmp_path / "job.sh").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "torchmn-logs").is_dir()  # the scheduler opens files there


REFUSED = {
    "kubernetes": (("--scheduler", "kubernetes", "train.py"), "docs/how-to/kubernetes.md has one"),
    "waits for nothing": (("--wait", "train.py"), "--dry-run submits none: leave one of them out"),
    "requeues": (("--max-requeues", "3", "train.py"), "without --requeue: add it"),
    "not a number": (("--gpus", "two", "train.py"), "--gpus must be a whole number, got 'two'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_are_one_message_and_exit_status_2(tmp_path: Path, case: str) -> None:
    args, words = REFUSED[case]
    (tmp_path / "train.py").touch()
    done = submit(tmp_path, "--dry-run", *args)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert not list(tmp_path.glob("*.sh"))
