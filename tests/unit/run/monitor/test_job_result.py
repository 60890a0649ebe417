"""Which rank failed first, the exit code and the summary."""

import signal
from pathlib import Path

import msgspec
import pytest

from torchmn.control.hang_report import HangReport
from torchmn.control.messages import EndedBy, Exit, Failed
from torchmn.run.monitor.job_result import JobResult, RankRecord, summarize


def ended(rank: int, code: int, at: float = 0.0, by: EndedBy = "itself") -> RankRecord:
    return RankRecord(
        rank, host="node7", exit=Exit(returncode=code, ended_at=at, ended_by=by), num_lines=1
    )


def summary_of(*records: RankRecord, **facts: object) -> JobResult:
    return summarize(records, log_dir=Path("logs"), **facts)  # type: ignore[arg-type]


def test_a_job_without_failures() -> None:
    assert summary_of(ended(0, 0), ended(1, 0)) == JobResult(exit_code=0)


def test_the_first_failure_counts_in_any_order_of_ranks() -> None:
    ranks = [ended(0, 4, at=2.0), ended(1, 3, at=1.0), ended(2, 0, at=0.5)]
    found = summary_of(*ranks)
    assert (found.exit_code, found.first_failure) == (3, ranks[1])
    assert found.summary == (
        f"rank 1 on node7 failed with exit code 3; its output is in {Path('logs/rank1.log')}."
    )


@pytest.mark.parametrize(
    ("signum", "code", "words"),
    [(signal.SIGKILL, 137, "SIGKILL (sent by another process"), (signal.SIGSEGV, 139, "SIGSEGV")],
)
def test_signal(signum: int, code: int, words: str) -> None:
    found = summary_of(ended(0, -signum))
    assert found.exit_code == code
    assert words in found.summary


def test_an_abort_names_the_exception_of_cpp_that_caused_it() -> None:
    aborted = ended(0, -signal.SIGABRT)
    aborted.last_errors.extend(["terminate called after", "  what():  20 vs 12.", "Fatal Python"])
    assert "rank 0 on node7 was ended by SIGABRT (20 vs 12.); " in summary_of(aborted).summary


def test_ranks_ended_by_the_launcher_are_not_the_cause() -> None:
    found = summary_of(ended(0, -15, at=1.0, by="outside"), ended(1, 7, at=2.0))
    assert found.exit_code == 7
    assert found.first_failure is not None
    assert found.first_failure.rank == 1


def test_the_launcher_failed_if_it_ended_all_ranks() -> None:
    found = summary_of(ended(0, -15, at=1.0, by="outside"), ended(1, 0), launcher_returncode=9)
    assert found.exit_code == 9
    assert found.is_launcher_failure
    assert str(Path("logs/launcher.log")) in found.summary
    assert summary_of(ended(0, -15, at=1.0, by="outside")).exit_code == 143


def test_lost_rank() -> None:
    lost = RankRecord(1, host="node7", lost_at=1.0, lost_returncode=-9)
    found = summary_of(ended(0, -15, at=2.0, by="supervisor"), lost)
    assert found.exit_code == 137
    assert "rank 1 on node7 was lost: its agent died of SIGKILL" in found.summary
    lost.lost_returncode = None
    assert summary_of(lost, ended(1, 0)).exit_code == 1


def test_a_rank_lost_while_it_was_terminated_did_not_fail() -> None:
    lost = RankRecord(0, lost_at=1.0, lost_returncode=-9, was_ending=True)
    assert summary_of(lost, ended(1, 5, at=2.0)).exit_code == 5


def test_a_failed_launcher() -> None:
    problem = "mpirun ended with exit code 2 before its ranks had started"
    found = summary_of(RankRecord(0), launcher_problem=problem, launcher_returncode=2)
    assert found.exit_code == 2
    assert found.summary.startswith(problem)
    silent = summary_of(RankRecord(0), launcher_problem="rank 0 did not start within 60 s")
    assert silent.exit_code == 1


def test_an_interruption_is_not_a_failure_of_a_rank() -> None:
    found = summary_of(ended(0, 1), RankRecord(1), interrupted_by=signal.SIGINT)
    assert found.exit_code == 130
    assert found.summary == "interrupted by SIGINT; all 2 ranks have ended."


def test_error_lines_begin_with_the_last_traceback() -> None:
    record = RankRecord(0)
    start = "Traceback (most recent call last):"
    record.last_errors.extend(["warning", start, "a", "During ...", start, "b", "Error: c"])
    assert record.error_lines == [start, "b", "Error: c"]
    plain = RankRecord(0)
    plain.last_errors.extend(str(i) for i in range(30))
    assert plain.error_lines == [str(i) for i in range(20, 30)]


def test_ranks_that_checkpointed_in_time_did_not_fail() -> None:
    found = summary_of(ended(0, 85, at=2.0), ended(1, 85, at=1.0))
    assert found.exit_code == 85
    assert "checkpointed and exited before the time limit" in found.summary


def failed(rank: int, at: float, *, follows: bool, code: int = 1) -> RankRecord:
    record = ended(rank, code, at=at + 0.5)
    record.failed = Failed(
        status=1,
        traceback=f"Traceback\nError: of {rank}",
        error=f"Error: of {rank}",
        is_consequence=follows,
        at=at,
    )
    return record


def test_a_rank_that_lost_a_peer_is_not_the_cause_though_it_ended_first() -> None:
    found = summary_of(failed(0, 1.0, follows=True), failed(1, 2.0, follows=False))
    assert found.first_failure is not None
    assert found.first_failure.rank == 1
    assert found.first_failure.error_lines == ["Traceback", "Error: of 1"]
    assert "failed with exit code 1 (Error: of 1)" in found.summary


def test_a_signal_is_the_cause_of_lost_peers() -> None:
    found = summary_of(failed(0, 1.0, follows=True), ended(1, -9, at=3.0))
    assert found.exit_code == 137
    assert "rank 1 on node7 was ended by SIGKILL" in found.summary


def test_a_terminated_rank_keeps_the_status_that_it_reported() -> None:
    """MPI_Finalize would have waited for the others, so the supervisor ended it."""
    record = ended(1, -15, at=2.0, by="supervisor")
    record.leaving_status = 3
    found = summary_of(ended(0, -15, at=2.0, by="supervisor"), record)
    assert found.exit_code == 3
    assert "rank 1 on node7 failed with exit code 3" in found.summary


def test_a_rank_that_left_early_is_the_cause_of_lost_peers() -> None:
    ranks = [failed(0, 2.0, follows=True), failed(1, 1.0, follows=True), ended(2, 0)]
    found = summary_of(*ranks)
    assert found.first_failure is ranks[2]
    assert found.exit_code == 1
    assert found.summary.startswith(
        "rank 2 on node7 left with exit code 0 while other ranks still needed it"
    )
    assert "Rank 1 failed after it (Error: of 1)" in found.summary
    assert summary_of(*ranks[:2]).first_failure is ranks[1]


def test_one_rank_that_saved_is_not_a_job_that_saved() -> None:
    found = summary_of(ended(0, 85, at=1.0), failed(1, 2.0, follows=True))
    assert found.exit_code == 1
    assert "rank 0 on node7 left with exit code 85 while other ranks" in found.summary


def test_ranks_that_saved_after_a_signal_were_not_interrupted() -> None:
    found = summary_of(ended(0, 85), ended(1, 85), interrupted_by=signal.SIGTERM)
    assert found.exit_code == 85
    assert "before SIGTERM (status 85)" in found.summary
    killed = ended(1, -9, by="supervisor")
    found = summary_of(ended(0, 85), killed, interrupted_by=signal.SIGTERM)
    assert found.exit_code == 143
    assert found.summary == (
        "interrupted by SIGTERM; rank 1 had not exited in time and was killed."
    )
    both = [ended(rank, -9, by="supervisor") for rank in range(2)]
    assert summary_of(*both, interrupted_by=signal.SIGTERM).summary == (
        "interrupted by SIGTERM; ranks 0, 1 had not exited in time and were killed."
    )


def test_an_error_of_several_lines_is_shown_whole_and_cut_between_words() -> None:
    record = failed(0, 1.0, follows=False)
    assert record.failed is not None
    error = "ValueError: first line\nsecond line " + "word " * 300 + "and the cure."
    record.failed = msgspec.structs.replace(record.failed, error=error)
    summary = summary_of(record).summary
    assert "(ValueError: first line second line word word" in summary
    assert "word ... word word" in summary
    assert "word and the cure.);" in summary


def test_a_launcher_ended_all_after_an_early_exit() -> None:
    """mpirun ends all ranks when one exits before it has called MPI_Init."""
    found = summary_of(ended(0, 0, at=0.5), ended(1, -15, at=1.0, by="outside"))
    assert found.exit_code == 143
    assert "Before that, rank 0 on node7 left with exit code 0" in found.summary


def test_the_summary_of_a_hang() -> None:
    hang = HangReport(
        what="barrier", limit_s=60, cause="why", short="some", text="all", missing=(1,)
    )
    found = summary_of(failed(0, 1.0, follows=True), ended(1, -9, by="supervisor"), hang=hang)
    assert found.exit_code == 1
    overdue = "barrier has not completed within 60 s; why"
    assert found.summary == f"{overdue}. Full report: {Path('logs/hang.txt')}."


def test_without_output_files_none_is_named() -> None:
    found = summary_of(ended(0, 3), keeps_output=False)
    assert found.summary == "rank 0 on node7 failed with exit code 3."
    exit_ = Exit(returncode=-9, ended_at=1.0, ended_by="itself", note="terminated without a report")
    found = summary_of(RankRecord(0, host="node7", exit=exit_), keeps_output=False)
    assert found.summary == "rank 0 on node7 terminated without a report."
    assert found.exit_code == 137
