"""Slurm: the header as in the manual, and the words of scontrol."""

from dataclasses import replace

import pytest

from tests.unit.submit.examples import SLURM_OF_THE_MANUAL, tutorial
from torchmn.cluster.commands import Answer
from torchmn.submit.slurm import Slurm

# scontrol show job --oneliner, shortened
ONE_LINE = (
    "JobId=7625 JobName=multi_node_training UserId=user(777) GroupId=group(888) MCS_label=N/A "
    "Priority=4294901494 Nice=0 Account=(null) QOS=(null) JobState={} Reason=None "
    "Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={} "
    "RunTime=00:00:22 TimeLimit=00:10:00\n"
)


def state(answer: Answer):  # type: ignore[no-untyped-def]
    return Slurm().state("7625", lambda _: answer)


def test_header_of_the_manual() -> None:
    assert Slurm().directives(tutorial()) == SLURM_OF_THE_MANUAL.splitlines()


def test_separate_output() -> None:
    lines = Slurm().directives(tutorial(join_output=False))
    assert "#SBATCH --output=torchmn-logs/%x.%j.slurm.out" in lines
    assert "#SBATCH --error=torchmn-logs/%x.%j.slurm.err" in lines


def test_a_job_that_may_continue_keeps_its_output() -> None:
    lines = Slurm().directives(replace(tutorial(), max_requeues=1))
    assert lines[-2:] == ["#SBATCH --requeue", "#SBATCH --open-mode=append"]


def test_gpus_and_a_warning() -> None:
    lines = Slurm().directives(tutorial(gpus=2, signal=90))
    assert "#SBATCH --gpus-per-node=2" in lines
    assert lines[-1] == "#SBATCH --signal=B:USR1@90"


@pytest.mark.parametrize("word", ["PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"])
def test_not_ended(word: str) -> None:
    found = state(Answer(returncode=0, out=ONE_LINE.format(word, "0:0")))
    assert (found.word, found.has_ended) == (word, False)


@pytest.mark.parametrize(
    ("word", "code", "status"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "3:0", 3),
        ("CANCELLED", "0:15", 143),
        ("TIMEOUT", "0:0", 1),
        ("OUT_OF_MEMORY", "0:125", 253),
        ("NODE_FAIL", "1:0", 1),
    ],
)
def test_ended(word: str, code: str, status: int) -> None:
    found = state(Answer(returncode=0, out=ONE_LINE.format(word, code)))
    assert (found.has_ended, found.exit_status) == (True, status)


def test_forgotten_and_silent() -> None:
    error = "slurm_load_jobs error: Invalid job id specified\n"
    forgotten = state(Answer(returncode=1, err=error))
    assert (forgotten.has_ended, forgotten.exit_status) == (True, None)
    assert state(Answer(returncode=1, err="Unable to contact slurm controller")) is None
