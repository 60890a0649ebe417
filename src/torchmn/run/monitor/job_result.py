"""The result of a job: the exit code, which rank failed first, and the summary for the user.

Pure functions of the records of all ranks.
"""

import math
import os
import re
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchmn.base.errors import SAVED_STATUS, shell_code
from torchmn.cluster.units import listed
from torchmn.control.connection import UNREACHABLE
from torchmn.control.hang_report import HangReport
from torchmn.control.messages import Exit, Failed, Joining, Overdue, StatusReply
from torchmn.control.processes import signal_name

# Where each run makes its log folder, unless the user names another place.
LOG_DIR = Path("torchmn-logs")
LATEST = "latest"  # the link there to the folder of the last run
JOB_FILE = "job.json"  # in the log folder: what was started, by `torchmn run` alone
HANG_FILE = "hang.txt"  # in the log folder: what all ranks did when the job was found to hang
# In the log folder: the summary, and the end of stderr of the rank that failed first.
FAILURE_FILE = "failure.txt"
_MAX_ERROR_CHARS = 600
_MAX_NAMED = 8  # ranks with the same error


def run_name() -> str:
    """Return ``<date>-<time>-<process>``, the name of a run's log folder; names sort by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


@dataclass
class RankRecord:
    """What is known about one rank. Times are in seconds since the epoch unless noted."""

    rank: int
    host: str = ""
    exit: Exit | None = None
    failed: Failed | None = None
    is_leaving: bool = False
    leaving_status: int = 0
    leaving_text: str = ""  # what it has not printed, as in `Leaving`
    joining: Joining | None = None
    joining_since: float | None = None  # of the monotonic clock of the process that keeps this
    has_joined: bool = False
    overdue: Overdue | None = None
    status_reply: StatusReply | None = None
    lost_at: float | None = None  # its agent died without a report
    is_silent: bool = False  # it may be alive: its host does not answer
    lost_returncode: int | None = None
    lost_text: str = ""  # how, if it is known
    stopped_at: float | None = None  # its process was stopped for too long
    stopped_text: str = ""
    was_ending: bool = False  # it was lost after it had been asked to end
    awaits_input: bool = False  # it waits for a person at the terminal
    num_lines: int = 0
    last_errors: deque[str] = field(default_factory=lambda: deque(maxlen=40))

    @property
    def has_ended(self) -> bool:
        """Whether the rank has exited or is lost, so that it sends nothing more."""
        return self.exit is not None or self.lost_at is not None

    @property
    def failed_at(self) -> float | None:
        """Time at which the rank failed by itself, or None.

        A rank that was asked to end did not fail by itself, nor did one that saved and exited, or
        whose error only reports that another rank has ended.
        """
        if self.failed is not None:
            return None if self.failed.is_consequence else self.failed.at
        if self.stopped_at is not None:
            return self.stopped_at
        if self.exit is not None:
            has_failed = not self.has_left and self.exit.ended_by != "supervisor"
            return self.exit.ended_at if has_failed else None
        return None if self.was_ending else self.lost_at

    @property
    def has_left(self) -> bool:
        """Whether the script has exited with status 0, or saved to continue in another job."""
        return self.exit is not None and self.exit.returncode in (0, SAVED_STATUS)

    @property
    def is_consequence(self) -> bool:
        """Whether the rank failed only because another rank did."""
        return self.failed is not None and self.failed.is_consequence

    @property
    def status(self) -> int:
        """The rank's own exit status; 0 if it has none."""
        if self.failed is not None:
            return self.failed.status
        if self.exit is not None and self.exit.ended_by != "supervisor":
            return shell_code(self.exit.returncode)
        if self.lost_text:
            return 1  # we killed it ourselves
        return self.leaving_status or shell_code(self.lost_returncode or 0)

    @property
    def was_terminated_externally(self) -> bool:
        """Whether a program outside the job has ended the rank, such as mpirun."""
        return self.exit is not None and self.exit.ended_by == "outside"

    @property
    def is_unprinted(self) -> bool:
        """Whether the rank has failed and left it to the launcher to print `error_lines`."""
        if self.failed is not None:
            return not self.failed.is_shown
        return bool(self.leaving_text and self.leaving_status)

    @property
    def error_lines(self) -> list[str]:
        """What the terminal shows of the rank's error, or the end of its standard error."""
        if self.failed is not None:
            return self.failed.traceback.splitlines()
        if self.leaving_text:
            return self.leaving_text.splitlines()
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
    """Return the result of a job whose ranks have all ended or never started.

    The first failure is that of the first rank that failed by itself. A rank whose error only
    reports that a peer is lost, or that a launcher ended, is reported only if there is no other.
    ``keeps_output`` says whether ``log_dir`` has a file with the output of each rank.
    """
    if all(r.has_left for r in ranks) and any(_exit_code(r) == SAVED_STATUS for r in ranks):
        before = f"{signal_name(-interrupted_by)}" if interrupted_by else "the time limit"
        return JobResult(
            exit_code=SAVED_STATUS,
            summary=f"all ranks checkpointed and exited before {before} (status {SAVED_STATUS}).",
        )
    if interrupted_by is not None:
        return JobResult(
            exit_code=shell_code(-interrupted_by),
            summary=f"interrupted by {signal_name(-interrupted_by)}; {_how_all_ended(ranks)}.",
        )
    if hang is not None:
        return JobResult(
            exit_code=1, summary=f"{hang.summary}. Full report: {log_dir / HANG_FILE}."
        )
    output_dir = log_dir if keeps_output else None
    by_itself = sorted((r.failed_at, r.rank) for r in ranks if r.failed_at is not None)
    causes = [ranks[rank] for _, rank in by_itself if not ranks[rank].was_terminated_externally]
    causes += [r for r in ranks if r.leaving_status not in (0, SAVED_STATUS) and r not in causes]
    if causes:
        return _failure_of(causes[0], output_dir, also=_others_with(causes))
    consequences = sorted((r.failed.at, r.rank) for r in ranks if r.failed and r.is_consequence)
    if consequences and not launcher_problem:
        reporter = ranks[consequences[0][1]]
        early = _first_that_left(ranks)
        return _early_exit_of(early, reporter) if early else _failure_of(reporter, output_dir)
    if by_itself or launcher_problem:
        terminated = [ranks[rank] for _, rank in by_itself]
        own_code = _exit_code(terminated[0]) if terminated else 1
        problem = launcher_problem or (
            f"{_describe_exit(terminated[0])}, by a signal from an external process"
        )
        summary = f"{problem}; the output of the launcher is in {log_dir / 'launcher.log'}."
        return JobResult(
            exit_code=shell_code(launcher_returncode) or own_code,
            summary=_with_early_exit(summary, ranks) if terminated else summary,
            is_launcher_failure=True,
        )
    return JobResult(exit_code=0)


def _failure_of(first: RankRecord, output_dir: Path | None, *, also: str = "") -> JobResult:
    """Return the result of a job that ``first`` has ended.

    Where the launcher prints the error, above the summary, the summary does not repeat it.
    """
    where, is_above = "", output_dir is not None and first.is_unprinted
    if output_dir is not None:
        what = "the whole traceback" if is_above and first.failed else "its output"
        where = f"; {what} is in {output_dir / f'rank{first.rank}.log'}"
    return JobResult(
        exit_code=_exit_code(first),
        summary=f"{_describe_exit(first, with_error=not is_above)}{also}{where}.",
        first_failure=first,
    )


def _others_with(causes: Sequence[RankRecord]) -> str:
    """Describe which ranks failed by themselves after the first one, alike or otherwise."""
    first, *later = causes
    others = [record for record in later if _error_of(record)]
    alike = [str(each.rank) for each in others if _error_of(each) == _error_of(first)]
    other = next((each for each in others if str(each.rank) not in alike), None)
    text = ""
    if alike:
        some = listed("rank", alike) if len(alike) <= _MAX_NAMED else f"{len(alike)} other ranks"
        text = f", as did {some}"
    if other is not None:
        error = brief(_error_of(other, is_general=False))
        text += f"; rank {other.rank} failed with another error ({error})"
    return text


def _error_of(record: RankRecord, *, is_general: bool = True) -> str:
    """The error of a rank, by default without what names the rank: its host and all numbers."""
    text = record.failed.error if record.failed else record.leaving_text
    return re.sub(r"\d+", "#", text.replace(record.host, "")) if is_general else text


def _first_that_left(ranks: Sequence[RankRecord]) -> RankRecord | None:
    """Return the rank that reached the end of its script first, None if no rank did."""
    left = [
        r
        for r in ranks
        if r.failed is None
        and (r.has_left or (r.is_leaving and r.leaving_status in (0, SAVED_STATUS)))
    ]
    ends = [(r.exit.ended_at if r.exit else math.inf, r.rank) for r in left]
    return ranks[min(ends)[1]] if ends else None


def _early_exit_of(early: RankRecord, reporter: RankRecord) -> JobResult:
    """Return the result of a job in which a rank left while other ranks still needed it."""
    error = brief(reporter.failed.error) if reporter.failed else ""
    return JobResult(
        exit_code=1,
        summary=f"{_name(early)} {_how_it_left(early)} while other ranks still needed it: see "
        f"optimizer.join() for uneven data. Rank {reporter.rank} failed after it ({error}).",
        first_failure=early,
    )


def _how_it_left(record: RankRecord) -> str:
    # one that waited for the others at exit was ended there
    code = record.exit.returncode if record.exit and record.has_left else record.leaving_status
    return f"left with exit code {code}"


def _with_early_exit(summary: str, ranks: Sequence[RankRecord]) -> str:
    """Add to a summary which rank had left before the others: that may be the cause."""
    early = _first_that_left(ranks)
    if early is None:
        return summary
    return f"{summary} Before that, {_name(early)} {_how_it_left(early)}."


def _how_all_ended(ranks: Sequence[RankRecord]) -> str:
    """Describe how the ranks ended after a signal from outside the job."""
    failed = [r for r in ranks if r.failed is not None and not r.is_consequence]
    if failed:
        return _describe_exit(failed[0])
    killed = [r.rank for r in ranks if r.exit and r.exit.returncode == -signal.SIGKILL]
    if killed:
        was = "was" if len(killed) == 1 else "were"
        return f"{listed('rank', killed)} had not exited in time and {was} killed"
    return f"all {len(ranks)} ranks have ended"


def brief(text: str) -> str:
    """Join the lines of a text; shorten it in the middle, since the advice comes last."""
    words = " ".join(text.removeprefix("torchmn: ").split())
    if len(words) <= _MAX_ERROR_CHARS:
        return words
    half = _MAX_ERROR_CHARS // 2
    begin, _, rest = words[:half].rpartition(" ")
    _, _, end = words[-half:].partition(" ")
    return f"{begin or rest} ... {end or words[-half:]}"


def _name(record: RankRecord) -> str:
    return f"rank {record.rank}" + (f" on {record.host}" if record.host else "")


def _exit_code(record: RankRecord) -> int:
    return record.status or 1


def _describe_exit(record: RankRecord, *, with_error: bool = True) -> str:
    name = _name(record)
    if record.failed is not None:
        error = f" ({brief(record.failed.error)})" if with_error else ""
        return f"{name} failed with exit code {record.failed.status}{error}"
    if record.stopped_at is not None:
        return f"{name} does not continue: {record.stopped_text}"
    if record.lost_text:
        return f"{name} was lost: {record.lost_text}"
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
    elif record.exit.returncode == -signal.SIGABRT:
        # What C++ prints of an exception that nobody catches, as gloo's about unequal sizes.
        causes = [line.partition("what():")[2] for line in record.last_errors if "what():" in line]
        ended_by += f" ({brief(causes[-1])})" if causes else ""
    return f"{name} was ended by {ended_by}"
