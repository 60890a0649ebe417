"""Jobs of `torchmn submit` under the real Slurm, Grid Engine and OpenPBS, on two nodes each."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.all.schedulers import exit_status, place, train
from tests.all.schedulers.cluster import MARKS, Cluster, running
from tests.all.schedulers.grid_engine import GridEngine
from tests.all.schedulers.pbs import PBS
from tests.all.schedulers.slurm import Slurm
from tests.limits import limit

pytestmark = MARKS

STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1] + "/steps", "w").close()
time.sleep(600)
"""
NUM_STEPS = 60
PATIENCE_S = 150


@pytest.fixture(scope="module", params=[Slurm, GridEngine, PBS], ids=lambda kind: kind.name)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    kind: type[Cluster] = request.param
    with running(kind, tmp_path_factory.mktemp(kind.name)) as started:
        yield started


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The parameters of a training that was never stopped."""
    folder = tmp_path_factory.mktemp("reference")
    run = [sys.executable, "-m", "torchmn", "run", "-n", "2", "--backend", "gloo"]
    subprocess.run(
        [*run, "--log-dir", folder / "logs", train.__file__, folder, str(NUM_STEPS), "1"],
        check=True,
        capture_output=True,
        timeout=limit(120),
    )
    return torch.load(folder / "finished")


class Training:
    """One job in a folder of its own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "slow").touch()
        self.process: subprocess.Popen[str] | None = None

    def submit(self, *options: object, margin_s: float = 1) -> None:
        """Submit it, one rank on each node, and follow it."""
        words = ["--nodes", 2, "--per-node", 1, "--name", "train", "--wait", "--join-output"]
        command = [*words, *options, train.__file__, self.folder, NUM_STEPS, margin_s]
        self.process = self.cluster.popen(self.cluster.submission(*command), self.folder)

    def steps(self) -> list[tuple[int, str]]:
        """The steps that were taken, and by which run."""
        path = self.folder / "steps"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(row[0]), row[1]) for row in rows]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + limit(PATIENCE_S)
        while not condition():
            assert time.monotonic() < deadline, self.output()
            assert self.process is None or self.process.poll() is None, self.output()
            time.sleep(0.1)

    def wait_for_steps(self, number: int = 3) -> None:
        self.wait_until(lambda: len(self.steps()) >= number)

    def wait_for_second_run(self) -> None:
        self.wait_until(lambda: len({run for _, run in self.steps()}) > 1)

    @property
    def number(self) -> str:
        """The number of the job that runs, as the names of its logs have it."""
        return sorted(self.folder.glob("torchmn-logs/train.*.log"))[-1].name.split(".")[1]

    def finish(self, row: exit_status.Row | None = None) -> str:
        """Let it take the steps that are left at once; it must end well. Its output."""
        (self.folder / "slow").unlink(missing_ok=True)
        status, output = self.end()
        assert status == (row.status(self.cluster.name) if row else 0), output
        return output

    def end(self) -> tuple[int, str]:
        """Wait for its end: the exit status of ``--wait``, and all output."""
        assert self.process is not None
        try:
            out, err = self.process.communicate(timeout=limit(PATIENCE_S))
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.output()) from None
        return self.process.returncode, out + err

    def output(self) -> str:
        """Everything that was written, for messages."""
        out = err = ""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            out, err = self.process.communicate(timeout=limit(30))
            out = out.partition('\nend_job "$status"\n')[2]  # after the script
        found = [path for path in self.folder.glob("torchmn-logs/*.*") if path.is_file()]
        logs = [f"== {path.name}\n{path.read_text()}" for path in sorted(found)]
        return "\n".join([f"{len(self.steps())} steps", out, err, *logs])

    def assert_finished(self, expected: dict[str, torch.Tensor]) -> None:
        """All steps once and in order, by several runs, and the same parameters."""
        found = self.steps()
        assert [step for step, _ in found] == list(range(1, NUM_STEPS + 1))
        assert len({run for _, run in found}) > 1
        assert_equal(torch.load(self.folder / "finished"), expected)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path) -> Iterator[Training]:
    started = Training(cluster, tmp_path)
    yield started
    if started.process is not None and started.process.poll() is None:
        started.process.kill()
        started.process.communicate()
        if cluster.has_jobs():
            cluster.cancel(started.number)


def test_all_ranks_are_placed_and_their_exit_status_is_that_of_wait(
    cluster: Cluster, tmp_path: Path
) -> None:
    command = cluster.submission("--nodes", 2, "--per-node", 2, "--walltime", "00:05:00")
    done = cluster.run([*command, "--wait", place.__file__, tmp_path, 3], tmp_path)
    status = exit_status.ALL_EXIT.status(cluster.name)
    assert done.returncode == status == 3, (done.stdout, done.stderr)
    assert place.are_two_on_each(tmp_path), place.places(tmp_path)


def test_a_queue_that_is_not_there(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run(cluster.submission("--queue", "nowhere", place.__file__, "."), tmp_path)
    assert done.returncode == exit_status.NO_QUEUE.status(cluster.name)
    assert cluster.unknown_queue in done.stderr
    assert (tmp_path / f"place.{cluster.name}.sh").exists()


def test_a_job_that_is_cancelled_stays_so(cluster: Cluster, training: Training) -> None:
    """It saves and leaves with 85, and is not resubmitted all the same."""
    training.submit("--requeue", "--walltime", "00:05:00")
    training.wait_for_steps()
    cluster.cancel(training.number)
    status, output = training.end()
    assert status == exit_status.CANCELLED.status(cluster.name), output
    num_steps = len(training.steps())
    assert num_steps < NUM_STEPS
    assert not cluster.has_jobs(), output
    assert not re.search(r"resubmitted as \d", output)


def test_a_time_limit_ends_a_job(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    command = cluster.submission("--walltime", cluster.shortest_limit, "--wait", "stubborn.py")
    done = cluster.run([*command, tmp_path], tmp_path, timeout_s=200)
    status = exit_status.TOO_LATE.status(cluster.name)
    assert done.returncode == status, (done.stdout, done.stderr)
    assert cluster.words_of_limit in done.stderr, done.stderr


def test_a_job_continues_when_its_time_is_over(
    training: Training, expected: dict[str, torch.Tensor]
) -> None:
    training.submit("--requeue", "--walltime", "00:04:00", margin_s=205)  # it has 35 s
    training.wait_for_second_run()
    training.finish(exit_status.IN_TIME)
    training.assert_finished(expected)


def test_a_job_continues_after_a_signal(
    cluster: Cluster, training: Training, expected: dict[str, torch.Tensor]
) -> None:
    training.submit("--requeue", "--walltime", "00:05:00", *cluster.signal_options)
    training.wait_for_steps()
    cluster.send_signal(training.number)
    training.wait_for_second_run()
    output = training.finish(exit_status.SIGNALLED)
    training.assert_finished(expected)
    assert "received SIGUSR1" in output


def test_a_job_whose_nodes_are_taken_away_continues(
    cluster: Cluster, training: Training, expected: dict[str, torch.Tensor]
) -> None:
    training.submit("--requeue", "--walltime", "00:05:00")
    training.wait_for_steps()
    cluster.preempt(training.number)
    training.wait_for_second_run()
    training.finish(exit_status.TAKEN_AWAY)
    assert_equal(torch.load(training.folder / "finished"), expected)


def test_a_node_that_fails(
    cluster: Cluster, training: Training, expected: dict[str, torch.Tensor]
) -> None:
    """The job ends and names the host; submitted again it continues from the last checkpoint."""
    training.submit("--walltime", "00:05:00")
    training.wait_for_steps(12)
    # not the one on which the job script runs, and rank 0
    first = (training.folder / "steps").read_text().split()[2]
    (failed,) = [node for node in cluster.nodes if node.name != first]
    cluster.fail_node(failed)
    try:
        status, output = training.end()
        assert status == exit_status.NODE_FAILED.status(cluster.name), output
        assert re.search(rf"(rank 1 on|connection to) {failed.name} was lost", output), output
    finally:
        cluster.repair_node(failed)
    training.submit("--walltime", "00:05:00")
    training.finish()
    assert 1 not in [step for step, _ in training.steps()[12:]]
    assert_equal(torch.load(training.folder / "finished"), expected)
