"""The last lines of a job script, run by a shell: when a job is resubmitted, and when not."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.submit.examples import tutorial
from torchmn.submit.scheduler import RESUBMITTED, last_lines
from torchmn.submit.site import SCHEDULERS

pytestmark = pytest.mark.processes

EXIT = "exit: the time limit of the job is near\n"


class JobScript:
    """Runs the last lines of one job after another, as PBS numbers them."""

    def __init__(self, folder: Path, max_requeues: int) -> None:
        self.folder, self.number = folder, 1
        job = replace(tutorial(), name="a", max_requeues=max_requeues)
        self.lines = "\n".join(last_lines(job, SCHEDULERS["pbs"]))

    def end(
        self, status: int, progress: str, *, qsub: str = "echo $((job + 1)).pbs", last: str = "no"
    ) -> str:
        """The words of the script, where the ranks wrote ``progress`` and ended with ``status``."""
        (self.folder / "log.progress").write_text(progress)
        begin = f"job={self.number} status={status} logs=. log=log last={last}\n"
        begin += f"qsub() {{ {qsub}; }}\n"
        done = subprocess.run(
            ["bash", "-c", begin + self.lines],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        self.number += RESUBMITTED in done.stdout
        return done.stdout + done.stderr


def test_a_job_continues_as_long_as_there_are_newer_checkpoints(tmp_path: Path) -> None:
    job = JobScript(tmp_path, max_requeues=10)
    for number, step in ((2, 10), (3, 25)):
        output = job.end(85, f"checkpoint of step {step}\n{EXIT}")
        assert output == f"torchmn: resubmitted as {number}.pbs\n"
    output = job.end(85, f"checkpoint of step 25\n{EXIT}")
    assert "no progress since the last time, the newest is the checkpoint of step 25" in output


def test_a_limit_of_resubmissions(tmp_path: Path) -> None:
    job = JobScript(tmp_path, max_requeues=2)
    output = [job.end(85, f"checkpoint of step {step}\n{EXIT}") for step in (1, 2, 3)]
    assert [RESUBMITTED in words for words in output] == [True, True, False]
    assert "this was done 2 times already (--max-requeues)" in output[2]


def test_checkpoints_of_ones_own_only_have_the_limit(tmp_path: Path) -> None:
    job = JobScript(tmp_path, max_requeues=2)
    assert [RESUBMITTED in job.end(85, EXIT) for _ in range(3)] == [True, True, False]


def test_a_script_that_exits_with_85_by_chance_is_not_resubmitted(tmp_path: Path) -> None:
    output = JobScript(tmp_path, max_requeues=10).end(85, "checkpoint of step 1\n")
    assert "not because torchmn.Preemption ended it" in output
    assert RESUBMITTED not in output


@pytest.mark.parametrize("status", [0, 1, 143])
def test_another_end_is_the_end(tmp_path: Path, status: int) -> None:
    job = JobScript(tmp_path, max_requeues=10)
    assert job.end(status, f"checkpoint of step 1\n{EXIT}") == ""


@pytest.mark.parametrize(
    ("progress", "last", "continues"),
    [
        ("limit 100\n", "TERM", True),  # the time is over
        ("limit 9000000000\n", "TERM", False),  # qdel, or PBS requeues the job itself
        ("", "TERM", False),
        ("limit 9000000000\n", "USR1", True),
    ],
)
def test_a_job_that_is_deleted_is_not_resubmitted(
    tmp_path: Path, progress: str, last: str, continues: bool
) -> None:
    output = JobScript(tmp_path, max_requeues=10).end(85, progress + EXIT, last=last)
    assert (RESUBMITTED in output) == continues
    assert ("PBS deletes or requeues this job" in output) != continues


def test_a_scheduler_that_refuses(tmp_path: Path) -> None:
    job = JobScript(tmp_path, max_requeues=10)
    output = job.end(85, EXIT, qsub="echo 'qsub: would exceed a limit' >&2; return 1")
    assert RESUBMITTED not in output
    assert "submit this job by hand to continue" in output
