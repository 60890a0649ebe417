"""When a job must end, and when the status of all ranks is requested first."""

import pytest

from torchmn.control.hang_report import HangReport
from torchmn.control.messages import (
    AwaitsInput,
    CollectiveStatus,
    Exit,
    Failed,
    Joined,
    Joining,
    Leaving,
    Message,
    Overdue,
    ProcessState,
    StatusReply,
)
from torchmn.run.job import FAILURE_GRACE_S
from torchmn.run.monitor.failure_detector import FailureDetector
from torchmn.run.monitor.job_result import RankRecord

OVERDUE = Overdue(group="world", number=1, limit_s=10.0)


def failed(*, is_consequence: bool, status: int = 1) -> Failed:
    return Failed(
        status=status, traceback="Error: x", error="x", is_consequence=is_consequence, at=5.0
    )


class Detector(FailureDetector):
    """Of ranks of one host, or of several."""

    def __init__(self, num_ranks: int, num_hosts: int = 1) -> None:
        hosts = ["node", *(f"node{number}" for number in range(1, num_hosts))]
        self.records = [RankRecord(r, host=hosts[r % num_hosts]) for r in range(num_ranks)]
        super().__init__(self.records)

    def receive(self, rank: int, message: Message, now: float) -> None:
        self.on_message(self.records[rank], message, now)

    @property
    def found(self) -> HangReport:
        assert self.hang is not None
        return self.hang


def test_a_cause_ends_the_job_at_once_and_a_consequence_later() -> None:
    detector = Detector(2)
    assert not detector.must_end(0.0)
    detector.receive(0, failed(is_consequence=True), 10.0)
    assert not detector.must_end(10.9)
    detector.receive(1, failed(is_consequence=False), 10.9)
    assert detector.must_end(10.9)


def test_a_nonzero_status_ends_the_job_if_the_rank_does_not_exit() -> None:
    detector = Detector(2)
    detector.receive(0, Leaving(status=0), 1.0)
    assert not detector.must_end(100.0)
    detector.receive(1, Leaving(status=3), 100.0)
    assert not detector.must_end(100.5)
    assert detector.must_end(101.5)
    assert detector.records[1].status == 3


def test_the_status_is_requested_once_and_the_job_ends_after_all_replies() -> None:
    detector = Detector(3)
    detector.receive(0, OVERDUE, 20.0)
    detector.receive(1, OVERDUE, 20.1)
    assert detector.must_query(20.2)
    assert not detector.must_query(20.3)
    detector.receive(0, failed(is_consequence=True), 20.3)
    detector.receive(0, StatusReply(), 20.4)
    detector.receive(1, StatusReply(), 20.4)
    assert not detector.must_end(22.0)  # although the consequence is old enough
    detector.receive(2, StatusReply(process=ProcessState.STOPPED), 22.4)
    assert detector.must_end(22.4)
    assert "rank 2 on node does not answer" in detector.found.summary


def test_a_rank_that_does_not_reply_is_not_waited_for_long() -> None:
    detector = Detector(2)
    detector.receive(0, OVERDUE, 20.0)
    assert detector.must_query(20.0)
    detector.receive(0, StatusReply(), 20.1)
    assert not detector.must_end(22.9)
    assert detector.must_end(23.1)
    assert "rank 1 on node has not answered" in detector.found.summary


@pytest.mark.parametrize(
    ("num_ranks", "num_hosts", "script_s", "all_s"),
    [(2, 1, 2.02, 3.02), (64, 1, 2.64, 3.64), (1024, 128, 2.08, 3.08), (256, 1, 4.0, 4.5)],
)
def test_many_ranks_of_a_host_may_reply_later(
    num_ranks: int, num_hosts: int, script_s: float, all_s: float
) -> None:
    """But never so late that a job whose ranks take all of their grace period exceeds 10 s."""
    detector = Detector(num_ranks, num_hosts)
    assert detector.reply_limit_s == pytest.approx(script_s)
    detector.receive(0, OVERDUE, 0.0)
    assert detector.must_query(0.0)
    there = CollectiveStatus(group="world", number=1, state="running")
    for record in detector.records[:-1]:
        detector.on_message(record, StatusReply(collectives=(there,)), all_s - 0.02)
    assert not detector.must_end(all_s - 0.01)
    assert detector.must_end(all_s + 0.01)
    assert all_s + FAILURE_GRACE_S < 10
    assert detector.found.missing == (num_ranks - 1,)


def test_a_rank_that_has_ended_is_reported_as_missing() -> None:
    detector = Detector(2)
    detector.records[1].exit = Exit(returncode=0, ended_at=1.0, ended_by="itself")
    detector.receive(0, OVERDUE, 20.0)
    assert detector.must_query(20.0)
    detector.receive(0, StatusReply(), 20.1)
    assert detector.must_end(20.1)
    assert "rank 1 on node has ended with exit code 0" in detector.found.summary


def test_a_cause_ends_the_job_while_replies_are_pending() -> None:
    detector = Detector(2)
    detector.receive(0, OVERDUE, 20.0)
    assert detector.must_query(20.0)
    detector.receive(1, failed(is_consequence=False), 20.1)
    assert detector.must_end(20.1)
    assert detector.hang is None


def test_a_rank_that_does_not_join_is_reported_with_its_state() -> None:
    """Rank 1 was stopped on its way; rank 0 is in MPI_Init, where it cannot answer."""
    detector = Detector(3)
    detector.receive(0, Joining(limit_s=20), 5.0)
    detector.receive(2, Joining(limit_s=20), 6.0)
    assert not detector.must_query(24.9)
    assert detector.must_query(25.0)
    detector.receive(0, StatusReply(process=ProcessState.SLEEPING), 25.1)
    detector.receive(1, StatusReply(process=ProcessState.STOPPED), 25.2)
    detector.receive(2, StatusReply(process=ProcessState.STOPPED), 25.2)
    assert detector.must_end(25.3)
    assert detector.found.missing == (1, 2)
    assert detector.found.summary.startswith(
        "joining all ranks (create_communicator) has not completed within 20 s; "
        "ranks 1, 2 did not reach it: rank 1 on node does not answer: its process is stopped"
    )


def test_a_rank_that_gives_up_joining_triggers_a_status_request() -> None:
    detector = Detector(2)
    detector.receive(0, Joining(limit_s=20), 5.0)
    detector.receive(0, failed(is_consequence=True), 24.0)
    assert detector.must_query(24.0)
    detector.receive(
        1, StatusReply(stacks='MainThread:\n  File "a.py", line 3, in load\n    x()'), 24.1
    )
    detector.receive(0, StatusReply(), 24.1)
    assert detector.must_end(24.2)
    assert (
        "rank 1 did not reach it: rank 1 on node runs at a.py:3 in load" in detector.found.summary
    )


def test_ranks_that_have_joined_are_not_late() -> None:
    detector = Detector(2)
    for record in detector.records:
        detector.on_message(record, Joining(limit_s=20), 5.0)
        detector.on_message(record, Joined(), 6.0)
    assert not detector.must_query(100.0)


def test_when_all_ranks_are_joining_the_network_is_the_cause() -> None:
    detector = Detector(2)
    for record in detector.records:
        detector.on_message(record, Joining(limit_s=20), 5.0)
    assert detector.must_query(25.0)
    for record in detector.records:
        detector.on_message(record, StatusReply(), 25.1)
    assert detector.must_end(25.2)
    assert "all ranks have reached it" in detector.found.summary


def test_the_time_that_a_person_takes_at_a_prompt_does_not_count() -> None:
    """Rank 1 stands in a debugger, before it joins."""
    detector = Detector(2)
    detector.receive(0, Joining(limit_s=5.0), 0.0)
    detector.receive(1, AwaitsInput(begins=True), 1.0)
    assert not detector.must_query(1000.0)
    detector.receive(1, AwaitsInput(begins=False), 1000.0)
    assert not detector.must_query(1004.0)
    assert detector.must_query(1005.1)
