"""Grid Engine: the header as in the manual, and the words of qstat and qacct."""

from dataclasses import replace

import pytest

from tests.unit.submit.examples import GRID_ENGINE_OF_THE_MANUAL, tutorial
from tests.unit.submit.test_pbs import found, state_of
from torchmn.cluster.commands import Answer
from torchmn.errors import UsageError
from torchmn.submit.grid_engine import GridEngine

GONE = Answer(returncode=1, err="Following jobs do not exist: \n123\n")
RECORD = """\
==============================================================
qname        all.q
hostname     node015.cluster
jobname      multi_node_training
jobnumber    123
granted_pe   mpi
slots        4
failed       {}
exit_status  {}
ru_wallclock 60
"""


def test_header_of_the_manual() -> None:
    lines = GridEngine().directives(tutorial(parallel_environment="mpi"))
    assert lines == GRID_ENGINE_OF_THE_MANUAL.splitlines()


def test_several_slots_need_a_parallel_environment() -> None:
    with pytest.raises(UsageError, match="needs a parallel environment for 4 slots"):
        GridEngine().directives(tutorial())
    one = replace(tutorial(), num_nodes=1, ranks_per_node=1)
    assert not [line for line in GridEngine().directives(one) if "-pe" in line]


def test_gpus_are_counted_for_each_slot() -> None:
    given = {"parallel_environment": "mpi", "gpus": 4}
    assert "#$ -l gpu=2" in GridEngine().directives(tutorial(**given, gpu_resource="gpu"))
    with pytest.raises(UsageError, match="gpu_resource ="):
        GridEngine().directives(tutorial(**given))
    with pytest.raises(UsageError, match="cannot be divided among 6 slots"):
        GridEngine().directives(tutorial(**given, gpu_resource="gpu", threads=3))


def test_separate_output() -> None:
    lines = GridEngine().directives(tutorial(parallel_environment="mpi", join_output=False))
    assert lines[-2:] == [
        "#$ -o torchmn-logs/$JOB_NAME.$JOB_ID.grid_engine.out",
        "#$ -e torchmn-logs/$JOB_NAME.$JOB_ID.grid_engine.err",
    ]


def test_state_while_it_is_known() -> None:
    answer = Answer(returncode=0, out="job_number:  123\nerror reason  1:  no such folder\n")
    state = state_of(GridEngine(), "123", answer)
    assert (state.word, state.has_ended) == ("E (no such folder)", False)


@pytest.mark.parametrize(
    ("records", "status"),
    [
        (RECORD.format(0, 0), 0),
        (RECORD.format(0, 3), 3),
        (RECORD.format("100 : assumedly after job", 137), 137),
        (RECORD.format("37  : qmaster enforced h_rt limit", 0), 1),
        (RECORD.format("25  : rescheduling", 99) + RECORD.format(0, 0), 0),
    ],
)
def test_exit_status_from_the_last_record(records: str, status: int) -> None:
    state, questions = found(GridEngine(), "123", GONE, Answer(returncode=0, out=records))
    assert state is not None
    assert (state.has_ended, state.exit_status, state.is_requeued) == (True, status, False)
    assert questions[1] == ["qacct", "-j", "123"]


def test_a_job_that_runs_again_may_be_unknown_for_a_moment() -> None:
    record = Answer(returncode=0, out=RECORD.format("25  : rescheduling", 99))
    assert state_of(GridEngine(), "123", GONE, record).is_requeued


def test_the_record_may_come_late() -> None:
    missing = Answer(returncode=1, err="error: job id 123 not found\n")
    state = state_of(GridEngine(), "123", GONE, missing)
    assert (state.has_ended, state.exit_status) == (True, None)


def test_a_master_that_does_not_answer_is_no_end() -> None:
    answer = Answer(returncode=1, err="error: unable to contact qmaster using port 6444")
    assert found(GridEngine(), "123", answer)[0] is None
