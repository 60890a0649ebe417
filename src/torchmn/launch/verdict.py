"""How a job ended: which rank failed first, and what to tell the user. Pure functions."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchmn.launch.job import SAVED_STATUS
from torchmn.launch.messages import Exit
from torchmn.launch.processes import shell_code, signal_name


@dataclass
class RankRecord:
    """What the supervisor knows about one rank. Times are seconds since the epoch."""

    rank: int
    host: str = ""
    exit: Exit | None = None
    lost_at: float | None = None  # its agent died without a report
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
        """When it failed, or ``None``. A rank that ended because we asked it to did not fail."""
        if self.exit is not None:
            has_failed = self.exit.returncode != 0 and self.exit.ended_by != "supervisor"
            return self.exit.ended_at if has_failed else None
        return None if self.was_ending else self.lost_at

    @property
    def is_victim(self) -> bool:
        """Whether somebody other than us told it to end, such as an mpirun that gave up."""
        return self.exit is not None and self.exit.ended_by == "outside"

    @property
    def last_words(self) -> list[str]:
        """Its last error lines, from the last traceback on."""
        lines = list(self.last_errors)
        starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")]
        return lines[starts[-1] :] if starts else lines[-10:]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The exit code of the job, a sentence if it is not 0, and the rank that failed first."""

    exit_code: int
    sentence: str = ""
    culprit: RankRecord | None = None
    blames_launcher: bool = False


def judge(
    ranks: Sequence[RankRecord],
    *,
    log_dir: Path,
    interrupted_by: int | None = None,
    launcher_problem: str = "",
    launcher_returncode: int = 0,
) -> Verdict:
    """The verdict over a job whose ranks have all ended or never started.

    The first rank that failed by itself is the culprit: ranks that follow have lost their peer,
    and ranks that a launcher ended are its victims.
    """
    if interrupted_by is not None:
        name = signal_name(-interrupted_by)
        return Verdict(
            exit_code=shell_code(-interrupted_by),
            sentence=f"interrupted by {name}; all {len(ranks)} ranks have ended.",
        )
    failed = sorted(
        (record.is_victim, record.failed_at, record.rank)
        for record in ranks
        if record.failed_at is not None
    )
    if failed and not failed[0][0]:
        culprit = ranks[failed[0][2]]
        if _exit_code(culprit) == SAVED_STATUS:
            return Verdict(
                exit_code=SAVED_STATUS,
                sentence=f"the ranks saved and left before the time limit (status {SAVED_STATUS}).",
            )
        log = log_dir / f"rank{culprit.rank}.log"
        return Verdict(
            exit_code=_exit_code(culprit),
            sentence=f"{_obituary(culprit)}; its output is in {log}.",
            culprit=culprit,
        )
    if failed or launcher_problem:
        victims = [ranks[rank] for _, _, rank in failed]
        own_code = _exit_code(victims[0]) if victims else 1
        problem = launcher_problem or f"{_obituary(victims[0])}, which neither it nor we sent"
        return Verdict(
            exit_code=shell_code(launcher_returncode) or own_code,
            sentence=f"{problem}; what the launcher said is in {log_dir / 'launcher.log'}.",
            blames_launcher=True,
        )
    return Verdict(exit_code=0)


def _exit_code(record: RankRecord) -> int:
    returncode = record.exit.returncode if record.exit else record.lost_returncode
    return shell_code(returncode) if returncode else 1


def _obituary(record: RankRecord) -> str:
    who = f"rank {record.rank}" + (f" on {record.host}" if record.host else "")
    if record.exit is None:
        name = signal_name(record.lost_returncode or 0)
        return f"{who} was lost: its agent died" + (f" of {name}" if name else "")
    name = signal_name(record.exit.returncode)
    if name is None:
        return f"{who} failed with exit code {record.exit.returncode}"
    if record.exit.returncode == -signal.SIGKILL:
        name = "SIGKILL (from outside, or because the memory was full)"
    return f"{who} was ended by {name}"
