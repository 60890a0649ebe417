"""PBS: the header as in the source documents, and the words of qstat."""

from collections.abc import Sequence

import pytest

from tests.unit.submit.examples import PBS_OF_ROW_4_10, tutorial
from torchmn.cluster.commands import Answer
from torchmn.submit.pbs import PBS
from torchmn.submit.scheduler import JobState, Scheduler

# The lines of `qstat -f` that matter, as OpenPBS and Torque print them.
RUNNING = """\
Job Id: 4256957.pbs02
    Job_Name = multi_node_training
    Job_Owner = user@login001.site.local
    resources_used.ncpus = 4
    job_state = R
    queue = h-tutorial
    Exit_status_of_nothing = 9
"""
FINISHED = RUNNING.replace("job_state = R", "job_state = F") + "    Exit_status = {}\n"
OF_TORQUE = "Job Id: 12345.server\n    job_state = C\n    exit_status = 1\n"
EARLIER = Answer(
    returncode=35,
    err="qstat: 4256957.pbs02 Job has finished, use -x or -H to obtain historical information\n",
)


def found(
    scheduler: Scheduler, job_id: str, *answers: Answer
) -> tuple[JobState | None, list[list[str]]]:
    """The state of a job of a scheduler that answers so in turn, and what it was asked."""
    questions: list[list[str]] = []
    waiting = list(answers)

    def ask(argv: Sequence[str]) -> Answer:
        questions.append(list(argv))
        return waiting.pop(0)

    return scheduler.state(job_id, ask), questions


def state_of(scheduler: Scheduler, job_id: str, *answers: Answer) -> JobState:
    state, _ = found(scheduler, job_id, *answers)
    assert state is not None
    return state


def test_header_of_row_4_10() -> None:
    lines = PBS().directives(tutorial())
    lines.remove("#PBS -l place=scatter")
    assert [line.replace(":ncpus=2", "") for line in lines[:5]] == PBS_OF_ROW_4_10.splitlines()
    assert lines[5:] == ["#PBS -r n", "#PBS -j oe", "#PBS -o torchmn-logs/", "#PBS -S /bin/bash"]


def test_separate_output() -> None:
    lines = PBS().directives(tutorial(join_output=False))
    assert "#PBS -j oe" not in lines
    assert {"#PBS -o torchmn-logs/", "#PBS -e torchmn-logs/"} <= set(lines)


@pytest.mark.parametrize("gpus", [None, 2])
def test_resources_of_a_site_stand_in_the_chunk(gpus: int | None) -> None:
    """Once, also with ``--gpus``."""
    lines = PBS().directives(tutorial(chunk="ncpus=36:ngpus=2", gpus=gpus))
    assert "#PBS -l select=2:ncpus=36:ngpus=2:mpiprocs=2:ompthreads=1" in lines


def test_nodes_are_whole_nodes() -> None:
    """By default PBS puts two chunks on one node, and gives a chunk one core."""
    lines = PBS().directives(tutorial(gpus=2, threads=3))
    assert "#PBS -l select=2:ncpus=6:ngpus=2:mpiprocs=2:ompthreads=3" in lines
    assert "#PBS -l place=scatter" in lines
    own = tutorial(directives=("#PBS -l place=pack",))
    assert not [line for line in PBS().directives(own) if "place" in line]


def test_state_while_it_runs() -> None:
    state, questions = found(PBS(), "4256957.pbs02", Answer(returncode=0, out=RUNNING))
    assert state is not None
    assert (state.word, state.has_ended, state.exit_status) == ("R", False, None)
    assert questions == [["qstat", "-f", "4256957.pbs02"]]


@pytest.mark.parametrize(
    ("reported", "status"), [(0, 0), (3, 3), (85, 85), (137, 137), (271, 143), (-29, 1)]
)
def test_exit_status_from_the_history(reported: int, status: int) -> None:
    """271 is 256 + SIGTERM (qdel); -29 is PBS's own word for the time limit."""
    history = Answer(returncode=0, out=FINISHED.format(reported))
    state, questions = found(PBS(), "4256957.pbs02", EARLIER, history)
    assert state is not None
    assert state.has_ended
    assert state.exit_status == status
    assert questions[1] == ["qstat", "-x", "-f", "4256957.pbs02"]


def test_a_deleted_job_has_not_succeeded() -> None:
    """OpenPBS keeps ``Exit_status = 0`` for a job that qdel ended."""
    text = FINISHED.format(0) + "    substate = 91\n"
    state = state_of(PBS(), "4256957.pbs02", EARLIER, Answer(returncode=0, out=text))
    assert (state.exit_status, state.reason) == (143, "deleted")


def test_a_site_without_history_leaves_the_exit_status_open() -> None:
    gone = Answer(returncode=153, err="qstat: Unknown Job Id 4256957.pbs02\n")
    state = state_of(PBS(), "4256957.pbs02", gone, gone)
    assert (state.has_ended, state.exit_status) == (True, None)


def test_torque() -> None:
    state = state_of(PBS(), "12345.server", Answer(returncode=0, out=OF_TORQUE))
    assert (state.has_ended, state.exit_status) == (True, 1)


def test_a_server_that_does_not_answer_is_no_end() -> None:
    answer = Answer(returncode=111, err="Connection refused\nqstat: cannot connect")
    assert found(PBS(), "1.pbs", answer)[0] is None


def test_resubmission_names_the_file() -> None:
    text = "\n".join(PBS().resubmission(tutorial(file="my jobs/a.sh")))
    assert "next=$(qsub 'my jobs/a.sh')" in text
