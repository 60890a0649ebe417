"""Who failed first, and the exit code and sentence that follow."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from torchmn.control.messages import EndedBy, Exit, Failed
from torchmn.monitor.hang_report import HangReport
from torchmn.monitor.job_result import JobResult, RankRecord, summarize


def ended(rank: int, code: int, at: float = 0.0, by: EndedBy = "itself") -> RankRecord:
    return RankRecord(
        rank, host="node7", exit=Exit(returncode=code, ended_at=at, ended_by=by), num_lines=1
    )


def verdict(*records: RankRecord, **facts: object) -> JobResult:
    return summarize(records, log_dir=Path("logs"), **facts)  # type: ignore[arg-type]


def test_all_is_well() -> None:
    assert verdict(ended(0, 0), ended(1, 0)) == JobResult(exit_code=0)


def test_first_failure_counts_whatever_the_order_of_ranks() -> None:
    ranks = [ended(0, 4, at=2.0), ended(1, 3, at=1.0), ended(2, 0, at=0.5)]
    found = verdict(*ranks)
    assert (found.exit_code, found.first_failure) == (3, ranks[1])
    assert found.sentence == (
        f"rank 1 on node7 failed with exit code 3; its output is in {Path('logs/rank1.log')}."
    )


def test_rank_that_we_ended_did_not_fail() -> None:
    found = verdict(ended(0, -15, at=0.5, by="supervisor"), ended(1, 3, at=1.0))
    assert found.exit_code == 3


@pytest.mark.parametrize(
    ("signum", "code", "words"),
    [(signal.SIGKILL, 137, "SIGKILL (from outside"), (signal.SIGSEGV, 139, "SIGSEGV")],
)
def test_signal(signum: int, code: int, words: str) -> None:
    found = verdict(ended(0, -signum))
    assert found.exit_code == code
    assert words in found.sentence


def test_victims_of_the_launcher_are_not_the_culprit() -> None:
    found = verdict(ended(0, -15, at=1.0, by="outside"), ended(1, 7, at=2.0))
    assert found.exit_code == 7
    assert found.first_failure is not None
    assert found.first_failure.rank == 1


def test_only_victims_blame_the_launcher() -> None:
    found = verdict(ended(0, -15, at=1.0, by="outside"), ended(1, 0), launcher_returncode=9)
    assert found.exit_code == 9
    assert found.is_launcher_failure
    assert str(Path("logs/launcher.log")) in found.sentence
    assert verdict(ended(0, -15, at=1.0, by="outside")).exit_code == 143


def test_lost_rank() -> None:
    lost = RankRecord(1, host="node7", lost_at=1.0, lost_returncode=-9)
    found = verdict(ended(0, -15, at=2.0, by="supervisor"), lost)
    assert found.exit_code == 137
    assert "rank 1 on node7 was lost: its agent died of SIGKILL" in found.sentence
    lost.lost_returncode = None
    assert verdict(lost, ended(1, 0)).exit_code == 1


def test_rank_that_got_lost_while_we_ended_it_did_not_fail() -> None:
    lost = RankRecord(0, lost_at=1.0, lost_returncode=-9, was_ending=True)
    assert verdict(lost, ended(1, 5, at=2.0)).exit_code == 5


def test_launcher_that_failed() -> None:
    problem = "mpirun ended with exit code 2 before its ranks had started"
    found = verdict(RankRecord(0), launcher_problem=problem, launcher_returncode=2)
    assert found.exit_code == 2
    assert found.sentence.startswith(problem)
    silent = verdict(RankRecord(0), launcher_problem="rank(s) 0 did not start within 60 s")
    assert silent.exit_code == 1


def test_interruption_is_not_a_failure_of_a_rank() -> None:
    found = verdict(ended(0, 1), RankRecord(1), interrupted_by=signal.SIGINT)
    assert found.exit_code == 130
    assert found.sentence == "interrupted by SIGINT; all 2 ranks have ended."


def test_last_words_begin_with_the_last_traceback() -> None:
    record = RankRecord(0)
    start = "Traceback (most recent call last):"
    record.last_errors.extend(["warning", start, "a", "During ...", start, "b", "Error: c"])
    assert record.error_lines == [start, "b", "Error: c"]
    plain = RankRecord(0)
    plain.last_errors.extend(str(i) for i in range(30))
    assert plain.error_lines == [str(i) for i in range(20, 30)]


def test_ranks_that_saved_in_time_did_not_fail() -> None:
    found = verdict(ended(0, 85, at=2.0), ended(1, 85, at=1.0))
    assert found.exit_code == 85
    assert "saved and left before the time limit" in found.sentence


def failed(rank: int, at: float, *, follows: bool, code: int = 1) -> RankRecord:
    record = ended(rank, code, at=at + 0.5)
    record.failed = Failed(
        status=1, words=f"Traceback\nError: of {rank}", is_consequence=follows, at=at
    )
    return record


def test_who_only_lost_a_peer_is_not_blamed_though_it_ended_first() -> None:
    found = verdict(failed(0, 1.0, follows=True), failed(1, 2.0, follows=False))
    assert found.first_failure is not None
    assert found.first_failure.rank == 1
    assert found.first_failure.error_lines == ["Traceback", "Error: of 1"]
    assert "failed with exit code 1 (Error: of 1)" in found.sentence


def test_a_signal_is_the_cause_of_what_follows() -> None:
    found = verdict(failed(0, 1.0, follows=True), ended(1, -9, at=3.0))
    assert found.exit_code == 137
    assert "rank 1 on node7 was ended by SIGKILL" in found.sentence


def test_a_rank_killed_by_us_keeps_the_status_it_told() -> None:
    """MPI_Finalize would have waited for the others, so the supervisor ended it."""
    record = ended(1, -15, at=2.0, by="supervisor")
    record.leaving_status = 3
    found = verdict(ended(0, -15, at=2.0, by="supervisor"), record)
    assert found.exit_code == 3
    assert "rank 1 on node7 failed with exit code 3" in found.sentence


def test_without_a_cause_the_first_that_lost_a_peer_and_who_had_left_before() -> None:
    ranks = [failed(0, 2.0, follows=True), failed(1, 1.0, follows=True), ended(2, 0)]
    found = verdict(*ranks)
    assert found.first_failure is ranks[1]
    assert "Before that rank 2 had ended with exit code 0" in found.sentence


def test_victims_of_a_launcher_that_a_rank_has_left_too_early() -> None:
    """mpirun ends all when one leaves before it has called MPI_Init."""
    found = verdict(ended(0, 0, at=0.5), ended(1, -15, at=1.0, by="outside"))
    assert found.exit_code == 143
    assert "Before that rank 0 had ended with exit code 0" in found.sentence


def test_a_hang_is_told_by_its_report() -> None:
    hang = HangReport(sentence="barrier has not completed", text="all", missing=(1,))
    found = verdict(failed(0, 1.0, follows=True), ended(1, -9, by="supervisor"), hang=hang)
    assert found.exit_code == 1
    assert found.sentence == (
        f"barrier has not completed. All that is known is in {Path('logs/hang.txt')}."
    )


def test_without_files_of_output_none_is_named() -> None:
    found = verdict(ended(0, 3), keeps_output=False)
    assert found.sentence == "rank 0 on node7 failed with exit code 3."
    exit_ = Exit(returncode=-9, ended_at=1.0, ended_by="itself", note="ended without a word")
    found = verdict(RankRecord(0, host="node7", exit=exit_), keeps_output=False)
    assert found.sentence == "rank 0 on node7 ended without a word."
    assert found.exit_code == 137


def test_a_silent_host_is_not_said_to_have_died() -> None:
    lost = RankRecord(1, host="node8", lost_at=1.0, is_silent=True)
    found = verdict(ended(0, -15, at=2.0, by="supervisor"), lost)
    assert found.exit_code == 1
    assert "rank 1 on node8 was lost: nothing has come from its host for 8 s" in found.sentence
