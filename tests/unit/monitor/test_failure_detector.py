"""When a job has to end, and whom it asks before."""

from __future__ import annotations

from torchmn.control.messages import Exit, Failed, Joined, Joining, Leaving, Overdue, StatusReply
from torchmn.monitor.failure_detector import FailureDetector
from torchmn.monitor.job_result import RankRecord

OVERDUE = Overdue(group="world", number=1, limit_s=10.0)


def failed(*, follows: bool, status: int = 1) -> Failed:
    return Failed(status=status, words="Error: x", is_consequence=follows, at=5.0)


def watch_over(num_ranks: int) -> tuple[FailureDetector, list[RankRecord]]:
    records = [RankRecord(rank, host="node") for rank in range(num_ranks)]
    return FailureDetector(records), records


def test_a_cause_ends_the_job_at_once_and_what_follows_from_it_later() -> None:
    watch, records = watch_over(2)
    assert not watch.must_end(0.0)
    watch.hear(records[0], failed(follows=True), 10.0)
    assert not watch.must_end(10.9)
    watch.hear(records[1], failed(follows=False), 10.9)
    assert watch.must_end(10.9)


def test_without_a_cause_what_follows_ends_the_job_as_well() -> None:
    watch, records = watch_over(2)
    watch.hear(records[0], failed(follows=True), 10.0)
    assert not watch.must_end(10.5)
    assert watch.must_end(11.1)


def test_a_rank_that_leaves_with_a_status_ends_the_job_if_it_does_not_end_itself() -> None:
    watch, records = watch_over(2)
    watch.hear(records[0], Leaving(status=0), 1.0)
    assert not watch.must_end(100.0)
    watch.hear(records[1], Leaving(status=3), 100.0)
    assert not watch.must_end(100.5)
    assert watch.must_end(101.5)
    assert records[1].status == 3


def test_all_are_asked_once_and_the_job_ends_when_all_have_told() -> None:
    watch, records = watch_over(3)
    watch.hear(records[0], OVERDUE, 20.0)
    watch.hear(records[1], OVERDUE, 20.1)
    assert watch.must_query(20.2)
    assert not watch.must_query(20.3)
    watch.hear(records[0], failed(follows=True), 20.3)
    watch.hear(records[0], StatusReply(), 20.4)
    watch.hear(records[1], StatusReply(), 20.4)
    assert not watch.must_end(22.0)  # though what follows from it is old enough
    watch.hear(records[2], StatusReply(state="does not answer: its process is stopped"), 22.4)
    assert watch.must_end(22.4)
    assert watch.hang is not None
    assert "rank 2 on node does not answer" in watch.hang.sentence


def test_who_does_not_tell_is_not_waited_for_for_long() -> None:
    watch, records = watch_over(2)
    watch.hear(records[0], OVERDUE, 20.0)
    assert watch.must_query(20.0)
    watch.hear(records[0], StatusReply(), 20.1)
    assert not watch.must_end(22.9)
    assert watch.must_end(23.1)
    assert watch.hang is not None
    assert "rank 1 on node has not answered" in watch.hang.sentence


def test_a_rank_that_has_ended_before_is_named_for_it() -> None:
    watch, records = watch_over(2)
    records[1].exit = Exit(returncode=0, ended_at=1.0, ended_by="itself")
    watch.hear(records[0], OVERDUE, 20.0)
    assert watch.must_query(20.0)
    watch.hear(records[0], StatusReply(), 20.1)
    assert watch.must_end(20.1)
    assert watch.hang is not None
    assert "rank 1 on node has ended with exit code 0" in watch.hang.sentence


def test_a_cause_that_comes_while_ranks_are_asked_ends_the_asking() -> None:
    watch, records = watch_over(2)
    watch.hear(records[0], OVERDUE, 20.0)
    assert watch.must_query(20.0)
    watch.hear(records[1], failed(follows=False), 20.1)
    assert watch.must_end(20.1)
    assert watch.hang is None


def test_a_rank_that_does_not_join_is_named_with_its_state() -> None:
    """Rank 1 was stopped on its way; rank 0 is in MPI_Init, where it cannot answer."""
    watch, records = watch_over(3)
    watch.hear(records[0], Joining(limit_s=20), 5.0)
    watch.hear(records[2], Joining(limit_s=20), 6.0)
    assert not watch.must_query(24.9)
    assert watch.must_query(25.0)
    watch.hear(records[0], StatusReply(state="does not answer: its process sleeps"), 25.1)
    watch.hear(
        records[1], StatusReply(state="does not answer: its process is stopped by a signal"), 25.2
    )
    watch.hear(
        records[2], StatusReply(state="does not answer: its process is stopped by a signal"), 25.2
    )
    assert watch.must_end(25.3)
    assert watch.hang is not None
    assert watch.hang.missing == (1, 2)
    assert watch.hang.sentence.startswith(
        "joining all ranks (create_communicator) has not completed within 20 s; "
        "ranks 1, 2 did not come to it: rank 1 on node does not answer: its process is stopped"
    )


def test_who_gives_up_joining_has_the_others_asked() -> None:
    watch, records = watch_over(2)
    watch.hear(records[0], Joining(limit_s=20), 5.0)
    watch.hear(records[0], failed(follows=True), 24.0)
    assert watch.must_query(24.0)
    watch.hear(
        records[1], StatusReply(stacks='MainThread:\n  File "a.py", line 3, in load\n    x()'), 24.1
    )
    watch.hear(records[0], StatusReply(), 24.1)
    assert watch.must_end(24.2)
    assert watch.hang is not None
    assert "rank 1 did not come to it: rank 1 on node runs at a.py:3 in load" in watch.hang.sentence


def test_ranks_that_have_joined_are_not_late() -> None:
    watch, records = watch_over(2)
    for record in records:
        watch.hear(record, Joining(limit_s=20), 5.0)
        watch.hear(record, Joined(), 6.0)
    assert not watch.must_query(100.0)


def test_when_all_are_joining_the_network_is_named() -> None:
    watch, records = watch_over(2)
    for record in records:
        watch.hear(record, Joining(limit_s=20), 5.0)
    assert watch.must_query(25.0)
    for record in records:
        watch.hear(record, StatusReply(), 25.1)
    assert watch.must_end(25.2)
    assert watch.hang is not None
    assert "all have come to it" in watch.hang.sentence
