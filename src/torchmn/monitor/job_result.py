"""The result of a job: the exit code, which rank failed first, and the summary for the user.

Pure functions of the records of all ranks.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchmn.control.connection import UNREACHABLE
from torchmn.control.messages.job import Exit
from torchmn.control.messages.monitor import Failed, Joining, Overdue, StatusReply
from torchmn.control.processes import signal_name
from torchmn.exit_status import SAVED_STATUS, shell_code
from torchmn.monitor.hang_report import HangReport

LOG_DIR = Path("torchmn-logs")
"""Where each run makes its log folder, unless the user names another place."""
HANG_FILE = "hang.txt"
"""In the log folder: what all ranks did when the job was found to hang."""
FAILURE_FILE = "failure.txt"
"""In the log folder: the summary, and the end of stderr of the rank that failed first."""


def run_name() -> str:
    """``<date>-<time>-<process>``, the name of a run's log folder: they sort by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


@dataclass
class RankRecord:
    """What is known about one rank. Times are seconds since the epoch."""

    rank: int
    host: str = ""
    exit: Exit | None = None
    failed: Failed | None = None
    is_leaving: bool = False
    leaving_status: int = 0
    joining: Joining | None = None
    joining_since: float | None = None  # of the monotonic clock of the process that keeps this
    has_joined: bool = False
    overdue: Overdue | None = None
    status_reply: StatusReply | None = None
    lost_at: float | None = None  # its agent died without a report
    is_silent: bool = False  # it may be alive: its host does not answer
    lost_returncode: int | None = None
    was_ending: bool = False  # it was lost after it had been asked to end
    num_lines: int = 0
    last_errors: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    num_lines_of_others_since: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can be received from it."""
        return self.exit is not None or self.lost_at is not None

    @property
    def failed_at(self) -> float | None:
        """When it failed by itself, or ``None``.

        A rank that was asked to end did not fail by itself, nor did one whose error only reports
        that another rank has ended.
        """
        if self.failed is not None:
            return None if self.failed.is_consequence else self.failed.at
        if self.exit is not None:
            has_failed = self.exit.returncode != 0 and self.exit.ended_by != "supervisor"
            return self.exit.ended_at if has_failed else None
        return None if self.was_ending else self.lost_at

    @property
    def is_consequence(self) -> bool:
        """Whether it failed only because of another rank."""
        return self.failed is not None and self.failed.is_consequence

    @property
    def status(self) -> int:
        """Its own exit status; 0 if it has none."""
        if self.failed is not None:
            return self.failed.status
        if self.exit is not None and self.exit.ended_by != "supervisor":
            return shell_code(self.exit.returncode)
        return self.leaving_status or shell_code(self.lost_returncode or 0)

    @property
    def was_terminated_externally(self) -> bool:
        """Whether another program asked it to end, such as an mpirun that gave up."""
        return self.exit is not None and self.exit.ended_by == "outside"

    @property
    def error_lines(self) -> list[str]:
        """The end of its standard error, from the last traceback on."""
        if self.failed is not None:
            return self.failed.traceback.splitlines()
        lines = list(self.last_errors)
        starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")]
        return lines[starts[-1] :] if starts else lines[-10:]


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """The exit code of the job, a summary if it is not 0, and the rank that failed first."""

    exit_code: int
    summary: str = ""
    first_failure: RankRecord | None = None
    is_launcher_failure: bool = False


def summarize(
    ranks: Sequence[RankRecord],
    *,
    log_dir: Path,
    interrupted_by: int | None = None,
    launcher_problem: str = "",
    launcher_returncode: int = 0,
    hang: HangReport | None = None,
    keeps_output: bool = True,
) -> JobResult:
    """The result of a job whose ranks have all ended or never started.

    The first failure is that of the first rank that failed by itself. A rank whose error only
    reports that a peer is lost, or that a launcher ended, is reported only if there is no other.
    ``keeps_output`` says whether ``log_dir`` has a file with the output of each rank.
    """
    if interrupted_by is not None:
        name = signal_name(-interrupted_by)
        return JobResult(
            exit_code=shell_code(-interrupted_by),
            summary=f"interrupted by {name}; all {len(ranks)} ranks have ended.",
        )
    if hang is not None:
        return JobResult(
            exit_code=1, summary=f"{hang.summary}. Full report: {log_dir / HANG_FILE}."
        )
    output_dir = log_dir if keeps_output else None
    by_itself = sorted((r.failed_at, r.rank) for r in ranks if r.failed_at is not None)
    causes = [ranks[rank] for _, rank in by_itself if not ranks[rank].was_terminated_externally]
    causes += [r for r in ranks if r.leaving_status and r not in causes]
    if causes:
        return _failure_of(causes[0], output_dir)
    consequences = sorted((r.failed.at, r.rank) for r in ranks if r.failed and r.is_consequence)
    if consequences and not launcher_problem:
        result = _failure_of(ranks[consequences[0][1]], output_dir)
        return replace(result, summary=_with_early_exits(result.summary, ranks))
    if by_itself or launcher_problem:
        terminated = [ranks[rank] for _, rank in by_itself]
        own_code = _exit_code(terminated[0]) if terminated else 1
        problem = launcher_problem or (
            f"{_describe_exit(terminated[0])}, by a signal from an external process"
        )
        summary = f"{problem}; the output of the launcher is in {log_dir / 'launcher.log'}."
        return JobResult(
            exit_code=shell_code(launcher_returncode) or own_code,
            summary=_with_early_exits(summary, ranks) if terminated else summary,
            is_launcher_failure=True,
        )
    return JobResult(exit_code=0)


def _failure_of(first_failure: RankRecord, output_dir: Path | None) -> JobResult:
    code = _exit_code(first_failure)
    if code == SAVED_STATUS:
        return JobResult(
            exit_code=SAVED_STATUS,
            summary="all ranks checkpointed and exited before the time limit "
            f"(status {SAVED_STATUS}).",
        )
    path = output_dir / f"rank{first_failure.rank}.log" if output_dir else None
    where = f"; its output is in {path}" if path else ""
    return JobResult(
        exit_code=code,
        summary=f"{_describe_exit(first_failure)}{where}.",
        first_failure=first_failure,
    )


def _with_early_exits(summary: str, ranks: Sequence[RankRecord]) -> str:
    """The summary, and which ranks had ended while the others continued: that may be the cause."""
    early = [r for r in ranks if r.exit is not None and r.exit.returncode == 0]
    if not early:
        return summary
    names = ", ".join(str(record.rank) for record in early)
    return (
        f"{summary} Before that, rank {names} ended with exit code 0, while other ranks needed it."
    )


def _exit_code(record: RankRecord) -> int:
    return record.status or 1


def _describe_exit(record: RankRecord) -> str:
    name = f"rank {record.rank}" + (f" on {record.host}" if record.host else "")
    if record.failed is not None:
        error = record.failed.traceback.strip().splitlines()[-1:]
        return f"{name} failed with exit code {record.failed.status}" + "".join(
            f" ({line.removeprefix('torchmn: ')[:200]})" for line in error
        )
    if record.leaving_status:
        return f"{name} failed with exit code {record.leaving_status}"
    if record.exit is not None and record.exit.note:
        return f"{name} {record.exit.note}"
    if record.is_silent:
        return f"{name} was lost: its host {UNREACHABLE}"
    if record.exit is None:
        signal_of_agent = signal_name(record.lost_returncode or 0)
        return f"{name} was lost: its agent died" + (
            f" of {signal_of_agent}" if signal_of_agent else ""
        )
    ended_by = signal_name(record.exit.returncode)
    if ended_by is None:
        return f"{name} failed with exit code {record.exit.returncode}"
    if record.exit.returncode == -signal.SIGKILL:
        ended_by = "SIGKILL (sent by another process, or because memory ran out)"
    return f"{name} was ended by {ended_by}"
