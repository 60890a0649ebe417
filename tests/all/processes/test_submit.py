"""`torchmn submit` end to end, with stand-ins for PBS and Grid Engine (`stand_in_scheduler.py`).

The job's `torchmn` is a stand-in too: it writes down how it was called and runs the script once.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchmn
from tests.all.processes import stand_in_scheduler
from tests.all.processes.runner import PYTHON_PATH
from tests.limits import limit

pytestmark = pytest.mark.processes

COMMANDS = {
    "pbs": ("qsub", "qstat", "qdel", "pbsnodes"),
    "grid_engine": ("qsub", "qstat", "qdel", "qacct", "qconf"),
}
TORCHMN = """\
#!/bin/sh
printf '%s\\n' "$@" >>{folder}/calls
env >{folder}/env
cat "$PBS_NODEFILE" "$PE_HOSTFILE" >{folder}/nodes 2>/dev/null
while [ "${{1%.py}}" = "$1" ]; do shift; done
exec python3 "$@"
"""
SCRIPT = """
import os, sys, pathlib
statuses = pathlib.Path("statuses")
first, *rest = statuses.read_text().split()
statuses.write_text(" ".join(rest))
print("arguments", sys.argv[1:], flush=True)
print("a warning", file=sys.stderr, flush=True)
if first == "85" and "TORCHMN_PROGRESS_FILE" in os.environ:  # as torchmn.Preemption does
    pathlib.Path(os.environ["TORCHMN_PROGRESS_FILE"]).write_text("exit: a test\\n")
sys.exit(int(first))
"""


class Cluster:
    """A login node with a scheduler, and a compute node that knows nothing of the login's PATH."""

    def __init__(self, flavour: str, folder: Path) -> None:
        self.flavour = flavour
        self.work, self.state = folder / "work", folder / "state"
        self.bin, self.node_bin, self.home = (
            folder / "bin",
            folder / "venv" / "bin",
            folder / "home",
        )
        for path in (self.work, self.state, self.bin, self.node_bin, self.home):
            path.mkdir(parents=True)
        for command in COMMANDS[flavour]:
            self.program(
                self.bin / command,
                f'#!/bin/sh\nexec "{sys.executable}" -S -E "{stand_in_scheduler.__file__}" '
                f'{flavour} "{self.state}" {command} "$@"\n',
            )
        self.program(self.node_bin / "torchmn", TORCHMN.format(folder=self.state))
        (self.node_bin / "activate").write_text(f'PATH="{self.node_bin}:$PATH"\nexport PATH\n')
        self.program(self.bin / "python3", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        login = {"HOME": str(self.home), "PATH": f"{self.bin}:/usr/bin:/bin"}
        (self.state / "login.json").write_text(json.dumps(login))
        (self.work / "train.py").write_text(SCRIPT)
        (self.work / "statuses").write_text("0")
        (self.work / "torchmn.toml").write_text(
            "queue = 'h-tutorial'\nexports = { NCCL_SHM_DISABLE = 1 }\n"
            "[grid_engine]\nparallel_environment = 'mpi'\n"
        )

    @staticmethod
    def program(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *args: str) -> subprocess.Popen[str]:
        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)

        return subprocess.Popen(
            [sys.executable, "-m", "torchmn", "submit", *args],
            cwd=self.work,
            env={
                "PATH": str(self.bin),  # nothing else: the machine may have a Slurm of its own
                "HOME": str(self.home),
                "PYTHONPATH": PYTHON_PATH,
                "ONLY_AT_LOGIN": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=prepare,
        )

    def submit(self, *args: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*args)
        try:
            out, err = process.communicate(timeout=limit(40))
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def calls(self) -> list[str]:
        return (self.state / "calls").read_text().splitlines()

    def env(self) -> dict[str, str]:
        lines = (self.state / "env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def log(self, pattern: str) -> str:
        found = sorted(self.work.glob(f"torchmn-logs/{pattern}"))
        assert found, sorted(self.work.glob("torchmn-logs/*"))
        return "".join(path.read_text() for path in found)

    def wait_for_the_end(self, number: str = "1") -> None:
        deadline = time.monotonic() + limit(20)
        while (record := json.loads((self.state / f"{number}.json").read_text()))["state"] != "F":
            assert time.monotonic() < deadline, record
            time.sleep(0.05)


@pytest.fixture(params=["pbs", "grid_engine"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(str(request.param), tmp_path)
    yield cluster
    trouble = cluster.state / "trouble"
    assert not trouble.exists() or trouble.read_text() == ""


ASKED = (
    *("--nodes", "2", "--per-node", "2", "--threads", "1", "--walltime", "00:10:00"),
    *("--name", "multi_node_training", "--join-output", "--activate", "../venv"),
)


def test_a_job_is_made_submitted_followed_and_its_exit_status_is_ours(cluster: Cluster) -> None:
    (cluster.work / "statuses").write_text("3")
    done = cluster.submit(*ASKED, "--wait", "train.py", "--epoch", "4", "a b")
    assert done.returncode == 3, done.stderr
    file = cluster.work / f"multi_node_training.{cluster.flavour}.sh"
    assert done.stdout.startswith(file.read_text())  # the script is shown as it is submitted
    name = "1.stand-in" if cluster.flavour == "pbs" else "1"
    assert f"job {name}; its output goes to torchmn-logs/multi_node_training.*" in done.stderr
    assert "using the site file" in done.stderr
    output = done.stdout.removeprefix(file.read_text())
    assert "arguments ['--epoch', '4', 'a b']" in output
    assert "a warning" in output
    assert f"torchmn {torchmn.__version__}" in output
    assert re.search(r"python 3\.\d+.*\btorch \d", output)
    assert output.endswith("torchmn: job ended with exit status 3\n")
    logs = [path.name for path in cluster.work.glob("torchmn-logs/multi_node_training.1.*")]
    assert any(re.fullmatch(r"multi_node_training\.1\.\d{8}-\d{6}\.log", name) for name in logs), (
        logs
    )


def test_the_job_finds_what_the_scheduler_gives_it(cluster: Cluster) -> None:
    assert cluster.submit(*ASKED, "--wait", "train.py", "-n", "3").returncode == 0
    calls = cluster.calls()
    place = calls.index("--log-dir")
    assert calls[:place] == [*("run", "-n", "4", "--threads", "1", "-x", "NCCL_SHM_DISABLE")]
    assert re.fullmatch(r"torchmn-logs/multi_node_training\.1\.\d{8}-\d{6}", calls[place + 1])
    assert calls[place + 2 :] == ["train.py", "-n", "3"]
    env = cluster.env()
    assert env["NCCL_SHM_DISABLE"] == "1"
    assert env["PWD"] == str(cluster.work)
    assert "ONLY_AT_LOGIN" not in env
    nodes = (cluster.state / "nodes").read_text()
    if cluster.flavour == "pbs":
        assert nodes == "n0\nn0\nn1\nn1\n"
        assert env["OMP_NUM_THREADS"] == "1"
    else:
        assert nodes == "n0 2 h-tutorial@n0 UNDEFINED\nn1 2 h-tutorial@n1 UNDEFINED\n"
        assert (env["NSLOTS"], env["NHOSTS"]) == ("4", "2")


def test_without_waiting_the_job_is_named_and_runs(cluster: Cluster) -> None:
    done = cluster.submit(*ASKED, "--split-output", "train.py")
    assert done.returncode == 0
    assert "arguments" not in done.stdout
    cluster.wait_for_the_end()
    assert "arguments []" in cluster.log("multi_node_training.1.*.out")
    assert "a warning" in cluster.log("multi_node_training.1.*.err")


def test_an_unknown_queue_is_refused_in_the_schedulers_words(cluster: Cluster) -> None:
    done = cluster.submit(*ASKED, "--queue", "nowhere", "train.py")
    assert done.returncode == 1
    words = {
        "pbs": "qsub: Unknown queue",
        "grid_engine": 'Job was rejected because job requests unknown queue "nowhere".',
    }
    assert words[cluster.flavour] in done.stderr
    assert "Traceback" not in done.stderr


def test_a_job_that_saved_continues_in_a_new_one_and_is_followed_there(cluster: Cluster) -> None:
    (cluster.work / "statuses").write_text("85 85 0")
    done = cluster.submit(*ASKED, "--requeue", "--wait", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("arguments []") == 3
    resubmitted = re.findall(r"torchmn: resubmitted as (\S+)", done.stdout)
    expected = ["2.stand-in", "3.stand-in"] if cluster.flavour == "pbs" else []
    assert [word for word in resubmitted if "$" not in word] == expected
    again = done.stdout.count("exit with 99: Grid Engine runs job 1 again\n")
    assert again == (0 if cluster.flavour == "pbs" else 2)


def test_a_node_without_torchmn_says_so(cluster: Cluster) -> None:
    done = cluster.submit(*ASKED[:-2], "--wait", "train.py")
    assert done.returncode == 127
    assert "use --activate" in done.stdout


def test_who_interrupts_leaves_the_job_running(cluster: Cluster) -> None:
    (cluster.work / "train.py").write_text("import time; print('up', flush=True); time.sleep(30)")
    process = cluster.start(*ASKED, "--wait", "train.py")
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "up\n":
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=limit(10))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    name = "1.stand-in" if cluster.flavour == "pbs" else "1"
    assert f"the job keeps running; `qdel {name}` ends it." in err
    assert json.loads((cluster.state / "1.json").read_text())["state"] == "R"
    subprocess.run([cluster.bin / "qdel", name], check=True)


def test_nothing_is_submitted_in_a_dry_run(cluster: Cluster) -> None:
    shown = cluster.submit(*ASKED, "--dry-run", "train.py")
    assert shown.returncode == 0
    assert shown.stdout.startswith("#!/bin/bash\n")
    assert not list(cluster.work.glob("*.sh"))
    written = cluster.submit(*ASKED, "--dry-run", "--output", "job.sh", "train.py")
    assert (cluster.work / "job.sh").read_text() == written.stdout
    assert (cluster.work / "job.sh").stat().st_mode & 0o777 == 0o700
    assert (cluster.work / "torchmn-logs").is_dir()  # the scheduler opens files there
    assert not list(cluster.state.glob("*.json.new"))
    assert not (cluster.state / "1.json").exists()


SAVES_ONCE = """
import os, pathlib, sys, time
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
marks = [pathlib.Path("saved-by-0"), pathlib.Path("saved-by-1")]
if not marks[rank].exists():
    marks[rank].touch()
    while not all(mark.exists() for mark in marks):  # who leaves first has the other ended
        time.sleep(0.01)
    pathlib.Path(os.environ["TORCHMN_PROGRESS_FILE"]).write_text("exit: a test\\n")
    sys.exit(85)
print("done by rank", rank)
"""


def test_the_real_torchmn_run_takes_its_node_from_the_scheduler(cluster: Cluster) -> None:
    """One node, this machine; the workers save once, and continue in a second job."""
    (cluster.work / "train.py").write_text(SAVES_ONCE)
    (cluster.state / "hosts").write_text(socket.gethostname())
    cluster.program(
        cluster.node_bin / "torchmn",
        f'#!/bin/sh\nPYTHONPATH="{PYTHON_PATH}" exec "{sys.executable}" -m torchmn "$@"\n',
    )
    asked = ("--per-node", "2", "--threads", "1", "--join-output", "--activate", "../venv")
    done = cluster.submit(*asked, "--requeue", "--wait", "train.py")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert {"[0] done by rank 0", "[1] done by rank 1"} <= set(done.stdout.splitlines())
    assert len(re.findall(r"resubmitted as \d|runs job 1 again\n", done.stdout)) == 1
    folders = [path for path in cluster.work.glob("torchmn-logs/train.*") if path.is_dir()]
    assert all((folder / "latest/rank1.log").exists() for folder in folders)


REFUSED = {
    "kubernetes": (("--scheduler", "kubernetes", "train.py"), "docs/how-to/kubernetes.md has one"),
    "image": (("--image", "a/b:1", "train.py"), "docs/how-to/kubernetes.md has one"),
    "no scheduler": (("train.py",), "neither qsub nor sbatch"),
    "command missing": (("--scheduler", "slurm", "train.py"), "sbatch, which is not on the PATH"),
    "name": (("--name", "my job", "train.py"), "use --name my_job"),
    "export": (("-x", "MISSING", "train.py"), "-x MISSING: this variable is not set"),
    "site": (("--site", "none.toml", "train.py"), "none.toml cannot be read"),
    "output is a folder": (("--output", ".", "train.py"), "--output . is a folder: name a file"),
    "output is the root": (("--output", "/", "train.py"), "--output / is a folder"),
    "waits for nothing": (("--wait", "train.py"), "--dry-run submits none: leave one of them out"),
    "requeues": (("--max-requeues", "3", "train.py"), "without --requeue: add it"),
    "not a number": (("--gpus", "two", "train.py"), "--gpus must be a whole number, got 'two'"),
    "log folder": (("--log-dir", "my logs", "train.py"), "--log-dir must be made of letters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_are_one_message_and_exit_status_2(tmp_path: Path, case: str) -> None:
    args, words = REFUSED[case]
    if case not in ("no scheduler", "command missing"):
        args = ("--dry-run", *(() if "--scheduler" in args else ("--scheduler", "pbs")), *args)
    (tmp_path / "train.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "torchmn", "submit", *args],
        cwd=tmp_path,
        env={"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert not list(tmp_path.glob("*.sh"))
