"""How a job ended: which rank failed first, and what to tell the user. Pure functions."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchmn.control.messages import Exit, Failed, Joining, Overdue, StatusReply
from torchmn.control.processes import signal_name
from torchmn.exit_status import SAVED_STATUS, shell_code
from torchmn.monitor.hang_report import HangReport

HANG_FILE = "hang.txt"
"""In the folder of the logs: what all ranks did when the job was found to hang."""
FAILURE_FILE = "failure.txt"
"""In the folder of the logs: the sentence and the last words of the rank that failed first."""


@dataclass
class RankRecord:
    """What the supervisor knows about one rank. Times are seconds since the epoch."""

    rank: int
    host: str = ""
    exit: Exit | None = None
    failed: Failed | None = None
    is_leaving: bool = False
    leaving_status: int = 0
    joining: Joining | None = None
    joining_since: float | None = None  # of the listener's monotonic clock
    has_joined: bool = False
    overdue: Overdue | None = None
    told: StatusReply | None = None
    lost_at: float | None = None  # its agent died without a report
    is_silent: bool = False  # it is not known to be dead: nothing comes from its host
    lost_returncode: int | None = None
    was_ending: bool = False  # it got lost after the supervisor had asked it to end
    num_lines: int = 0
    last_errors: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    num_lines_of_others_since: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether no more is to be heard from it."""
        return self.exit is not None or self.lost_at is not None

    @property
    def failed_at(self) -> float | None:
        """When it failed by itself, or ``None``.

        A rank that ended because we asked it to did not, nor did one that only says that another
        has ended.
        """
        if self.failed is not None:
            return None if self.failed.is_consequence else self.failed.at
        if self.exit is not None:
            has_failed = self.exit.returncode != 0 and self.exit.ended_by != "supervisor"
            return self.exit.ended_at if has_failed else None
        return None if self.was_ending else self.lost_at

    @property
    def follows(self) -> bool:
        """Whether it failed only because of another rank."""
        return self.failed is not None and self.failed.is_consequence

    @property
    def status(self) -> int:
        """The exit status that is its own; 0 if it has none."""
        if self.failed is not None:
            return self.failed.status
        if self.exit is not None and self.exit.ended_by != "supervisor":
            return shell_code(self.exit.returncode)
        return self.leaving_status or shell_code(self.lost_returncode or 0)

    @property
    def was_terminated_externally(self) -> bool:
        """Whether somebody other than us told it to end, such as an mpirun that gave up."""
        return self.exit is not None and self.exit.ended_by == "outside"

    @property
    def error_lines(self) -> list[str]:
        """Its last error lines, from the last traceback on."""
        if self.failed is not None:
            return self.failed.words.splitlines()
        lines = list(self.last_errors)
        starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")]
        return lines[starts[-1] :] if starts else lines[-10:]


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """The exit code of the job, a sentence if it is not 0, and the rank that failed first."""

    exit_code: int
    sentence: str = ""
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
    """The verdict over a job whose ranks have all ended or never started.

    The first rank that failed by itself is the first_failure. Ranks that only say that a peer is lost
    follow from it, and ranks that a launcher ended are its victims: neither is blamed as long as
    there is a cause. ``keeps_output`` says whether the folder has a file with each rank's output.
    """
    if interrupted_by is not None:
        name = signal_name(-interrupted_by)
        return JobResult(
            exit_code=shell_code(-interrupted_by),
            sentence=f"interrupted by {name}; all {len(ranks)} ranks have ended.",
        )
    if hang is not None:
        return JobResult(
            exit_code=1, sentence=f"{hang.sentence}. All that is known is in {log_dir / HANG_FILE}."
        )
    by_itself = sorted((r.failed_at, r.rank) for r in ranks if r.failed_at is not None)
    causes = [ranks[rank] for _, rank in by_itself if not ranks[rank].was_terminated_externally]
    causes += [r for r in ranks if r.leaving_status and r not in causes]
    if causes:
        return _blame(causes[0], log_dir if keeps_output else None)
    followers = sorted((r.failed.at, r.rank) for r in ranks if r.failed is not None and r.follows)
    if followers and not launcher_problem:
        verdict = _blame(ranks[followers[0][1]], log_dir if keeps_output else None)
        return replace(verdict, sentence=_with_early(verdict.sentence, ranks))
    if by_itself or launcher_problem:
        victims = [ranks[rank] for _, rank in by_itself]
        own_code = _exit_code(victims[0]) if victims else 1
        problem = launcher_problem or f"{_obituary(victims[0])}, which neither it nor we sent"
        sentence = f"{problem}; what the launcher said is in {log_dir / 'launcher.log'}."
        return JobResult(
            exit_code=shell_code(launcher_returncode) or own_code,
            sentence=_with_early(sentence, ranks) if victims else sentence,
            is_launcher_failure=True,
        )
    return JobResult(exit_code=0)


def _blame(first_failure: RankRecord, log_dir: Path | None) -> JobResult:
    code = _exit_code(first_failure)
    if code == SAVED_STATUS:
        return JobResult(
            exit_code=SAVED_STATUS,
            sentence=f"the ranks saved and left before the time limit (status {SAVED_STATUS}).",
        )
    where = f"; its output is in {log_dir / f'rank{first_failure.rank}.log'}" if log_dir else ""
    return JobResult(
        exit_code=code, sentence=f"{_obituary(first_failure)}{where}.", first_failure=first_failure
    )


def _with_early(sentence: str, ranks: Sequence[RankRecord]) -> str:
    """The sentence, and who had left while the others went on: that may be why."""
    early = [r for r in ranks if r.exit is not None and r.exit.returncode == 0]
    if not early:
        return sentence
    who = ", ".join(str(record.rank) for record in early)
    return f"{sentence} Before that rank {who} had ended with exit code 0, while others needed it."


def _exit_code(record: RankRecord) -> int:
    return record.status or 1


def _obituary(record: RankRecord) -> str:
    who = f"rank {record.rank}" + (f" on {record.host}" if record.host else "")
    if record.failed is not None:
        error = record.failed.words.strip().splitlines()[-1:]
        return f"{who} failed with exit code {record.failed.status}" + "".join(
            f" ({line[:200]})" for line in error
        )
    if record.leaving_status:
        return f"{who} failed with exit code {record.leaving_status}"
    if record.exit is not None and record.exit.note:
        return f"{who} {record.exit.note}"
    if record.is_silent:
        return (
            f"{who} was lost: nothing has come from its host for 8 s (the network, or the host "
            "itself)"
        )
    if record.exit is None:
        name = signal_name(record.lost_returncode or 0)
        return f"{who} was lost: its agent died" + (f" of {name}" if name else "")
    name = signal_name(record.exit.returncode)
    if name is None:
        return f"{who} failed with exit code {record.exit.returncode}"
    if record.exit.returncode == -signal.SIGKILL:
        name = "SIGKILL (from outside, or because the memory was full)"
    return f"{who} was ended by {name}"
