"""Machines that come and go: hosts that join an elastic job by themselves, and notices of the end.

The hosts are network namespaces (`tests.netlab`), each of which runs the same command.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.all.processes.runner import PYTHON_PATH, Runner
from tests.all.processes.test_elastic import (
    SCRIPT,
    Run,
    _ends_runs,
    assert_every_sample_once,
    assert_same_result,
    left_of,
)
from tests.limits import limit
from tests.marks import ON_TEST_HOSTS
from tests.netlab import Host, Lab

__all__ = ["_ends_runs"]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]
SECRET = "a secret that only the hosts know"
PORT, METADATA_PORT = 29400, 8169


def begin(lab: Lab, host: Host, folder: Path, *words: object, secret: str = SECRET) -> Run:
    """The command that is the same on all hosts."""
    command = [sys.executable, "-m", "torchmn", "run", "--log-dir", "logs", "--backend", "gloo"]
    command += ["--master-addr", lab.hosts[0].address, "--master-port", str(PORT), "-n", "1"]
    file = folder / f"secret-{host.name}"
    file.write_text(secret)
    file.chmod(0o600)
    env = {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    env["TORCHMN_SECRET_FILE"] = str(file)
    return Run(folder, lambda **more: host.popen([*command, *map(str, words)], env=env, **more))


class TestJoining:
    """A host runs one command, and takes part."""

    pytestmark = ON_TEST_HOSTS

    @pytest.mark.parametrize(("by", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
    def test_a_host_joins_and_leaves(
        self, lab: Lab, tmp_path: Path, by: signal.Signals, code: int
    ) -> None:
        """Whoever ends its command, Ctrl-C too, takes only this host out, and no step is lost."""
        words = ("--elastic", "1:2", SCRIPT, ".", 0.05, 3, "saves")
        first = begin(lab, lab.hosts[0], tmp_path, *words)
        first.wait_for("[0] step 5")
        second = begin(lab, lab.hosts[1], tmp_path, *words)
        first.wait_for("in round 2")
        first.wait_until(lambda: len(first.steps_of(2)) > 5)
        second.process.send_signal(by)
        first.wait_until(lambda: first.steps_of(3))
        assert second.end() == code, second.text
        assert f"received {by.name}; the ranks have as long as --grace, 30 s to save" in second.text
        (tmp_path / "enough").touch()
        assert first.end() == 0, first.text
        assert {number: size for number, size, *_ in first.steps()} == {1: 1, 2: 2, 3: 1}
        assert f"may join at {lab.hosts[0].address}:{PORT}" in first.text
        assert "n1 joined; waiting for the next checkpoint" in first.text
        assert f"n1 leaves: it received {by.name}" in first.text
        assert "was lost" not in first.text
        assert f"n1 joins the job at {lab.hosts[0].address}:{PORT} with 1 rank" in second.text
        # All have saved at the step at which they left: none is made again.
        assert first.steps_of(3)[0] == first.steps_of(2)[-1] + 1
        num_steps = first.steps_of(3)[-1]
        assert_every_sample_once(first, num_steps)
        assert_same_result(first, num_steps)
        assert left_of(first) == []

    def test_hosts_may_start_in_any_order(self, lab: Lab, tmp_path: Path) -> None:
        """They wait for each other, and node ranks decide on their order."""
        words = ("--elastic", "2:2", SCRIPT, ".", 0.01, 0)
        second = begin(lab, lab.hosts[1], tmp_path, "--node-rank", 0, *words)
        time.sleep(1.0)
        assert second.process.poll() is None
        first = begin(lab, lab.hosts[0], tmp_path, "--node-rank", 1, *words)
        first.wait_for("[0] step 3")
        (tmp_path / "enough").touch()
        assert first.end() == 0, first.text
        assert second.end() == 0, second.text
        assert "continuing" not in first.text
        (binding,) = tmp_path.glob("logs/2*/round1/binding.txt")
        assert re.search(
            r"rank 0 on n1.*\n?rank 1 on n0|rank 1 on n0.*\nrank 0 on n1", binding.read_text()
        )
        assert left_of(first) == []

    def test_another_secret(self, lab: Lab, tmp_path: Path) -> None:
        """It is refused within seconds, with what to compare; the job is not disturbed."""
        words = ("--elastic", "1:2", SCRIPT, ".", 0.02, 0)
        first = begin(lab, lab.hosts[0], tmp_path, *words)
        first.wait_for("[0] step 2")
        second = begin(lab, lab.hosts[1], tmp_path, *words, secret="another secret, no less long")
        assert second.end() == 1
        assert f"The rendezvous at '{lab.hosts[0].address}:{PORT}' does not answer" in second.text
        assert "TORCHMN_SECRET" in second.text
        assert "on n1" in second.text
        (tmp_path / "enough").touch()
        assert first.end() == 0, first.text
        assert "n1" not in first.text.replace("--", "")

    def test_no_launcher(self, lab: Lab, tmp_path: Path) -> None:
        run = begin(lab, lab.hosts[1], tmp_path, "--elastic", "1:2:1", SCRIPT, ".", 0.01, 0)
        assert run.end() == 1
        assert re.search(rf"n1 has not reached the launcher at .*:{PORT} within 1 s", run.text)
        assert "Run the same command on the host with that address" in run.text

    def test_a_host_without_the_script(self, lab: Lab, tmp_path: Path) -> None:
        """Launcher and host say so, and the job continues."""
        words = ("--elastic", "1:2", "script.py", ".", 0.02, 1)
        folder = tmp_path / "only-here"
        folder.mkdir()
        for each in (folder, tmp_path):
            (each / "script.py").write_text(SCRIPT.read_text())
        first = begin(lab, lab.hosts[0], folder, *words)
        first.wait_for("[0] step 2")
        (folder / "script.py").unlink()
        second = begin(lab, lab.hosts[1], tmp_path, *words)
        assert second.end() == 1
        for run in (first, second):
            run_text = run.text if run is second else ""
            assert not run_text or "only-here/script.py is not there" in run_text
        first.wait_for("n1 leaves: the script")
        (folder / "enough").touch()
        assert first.end() == 0, first.text
        assert {number for number, *_ in first.steps()} == {1}

    def test_a_notice_of_the_cloud(self, lab: Lab, tmp_path: Path) -> None:
        """One host is told its end: all save at the same step, and the others continue without it.

        The metadata address does not answer on the other host, which costs nothing.
        """
        server = [sys.executable, Path(__file__).with_name("metadata_server.py")]
        served = lab.hosts[1].popen([*server, str(METADATA_PORT), str(tmp_path / "notice")])
        source = f"aws=http://127.0.0.1:{METADATA_PORT}"
        words = ("--elastic", "1:2", "--preemption", source, SCRIPT, ".", 0.05, 0, "saves")
        first = begin(lab, lab.hosts[0], tmp_path, *words)
        second = begin(lab, lab.hosts[1], tmp_path, *words)
        try:
            first.wait_for("[0] step 5")
            (tmp_path / "notice").touch()
            first.wait_until(lambda: first.steps_of(2))
            assert second.end() == 0, second.text
            (tmp_path / "enough").touch()
            assert first.end() == 0, first.text
        finally:
            served.kill()
            served.wait()
        assert "n1 leaves: AWS will terminate it at 2027-01-02T08:22:00Z" in first.text
        assert first.text.count("does not answer") == 1
        assert f"--preemption {source} on n0 does not answer: " in first.text
        assert {number: size for number, size, *_ in first.steps()} == {1: 2, 2: 1}
        assert first.steps_of(2)[0] == first.steps_of(1)[-1] + 1
        assert_every_sample_once(first, first.steps_of(2)[-1])
        assert left_of(first) == []


SAVING = """
import pathlib, sys, time
import torchmn
comm = torchmn.create_communicator("naive")
step = 0
def save():
    pathlib.Path(f"saved{rank}").write_text(str(step))
preemption = torchmn.Preemption(comm, save, period_s=0.05)
print("begins", flush=True)
deadline = time.monotonic() + limit(60)
while time.monotonic() < deadline:
    step += 1
    time.sleep(0.005)
    preemption.step_ended()
"""


def test_a_file_ends_a_job(runner: Runner) -> None:
    """All ranks save after the same step; and the file must not be there when the job starts."""
    runner.script(SAVING)
    process = runner.start("-n", "2", "--backend", "gloo", "--preemption", "stop", "script.py")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)]
    (runner.folder / "stop").write_text("power is switched off\n")
    _, err = process.communicate(timeout=limit(60))
    assert process.returncode == 85, err
    saved = [(runner.folder / f"saved{rank}").read_text() for rank in range(2)]
    assert saved[0] == saved[1]
    reason = f"the file {runner.folder / 'stop'} is there (power is switched off)"
    assert f"will be preempted: {reason}" in err
    assert f"saved and exited: this host will be preempted: {reason}" in err
    runner.wait_until_nothing_is_left()
    done = runner.run("-n", "2", "--backend", "gloo", "--preemption", "stop", "script.py")
    assert done.returncode == 2, done.stderr
    assert "the file is there already" in done.stderr


ENDS_AFTER_A_FILE = """
import pathlib, time
print("begins", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
print("ends")
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [("stop", "will be preempted"), ("gcp=http://127.0.0.1:1", "does not answer")],
    ids=["a file", "a cloud that is not there"],
)
def test_a_script_without_preemption_is_left_alone(
    runner: Runner, source: str, message: str
) -> None:
    """It is told nothing, since nothing in it would save; the launcher says so once."""
    script = runner.script(ENDS_AFTER_A_FILE)
    process = runner.start("-n", "2", "--backend", "gloo", "--preemption", source, script)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    if source == "stop":
        (runner.folder / source).touch()
    said = next(line for line in process.stderr if message in line)
    (runner.folder / "go").touch()
    out, err = process.communicate(timeout=limit(60))
    assert process.returncode == 0, err
    assert out.count("ends") == 2
    assert (said + err).count(message) == 1
