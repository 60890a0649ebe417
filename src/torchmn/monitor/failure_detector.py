"""What the ranks say of failures and hangs, and whether the job must end because of it.

Used by whoever hears all ranks: the supervisor of ``torchmn run``, or under another launcher the
hub. Pure: told the time, it touches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.control.messages import Failed, Joined, Joining, Leaving, Message, Overdue, StatusReply
from torchmn.monitor.hang_report import HangReport, report, report_of_joining
from torchmn.monitor.job_result import RankRecord

_CAUSE_S = 1.0
"""How long the cause may be known later than what follows from it."""
_ANSWERS_S = 3.0


class FailureDetector:
    """Over the ranks of ``records``. Moments are of one monotonic clock, in seconds."""

    def __init__(self, records: Sequence[RankRecord]) -> None:
        self._records = records
        self._suspicious_since: float | None = None
        self._asked_at: float | None = None
        self._asker: RankRecord | None = None
        self.hang: HangReport | None = None

    def hear(self, record: RankRecord, message: Message, now: float) -> None:
        """Take note of what a rank, or its agent, says."""
        if isinstance(message, Failed):
            record.failed = record.failed or message
            if message.is_consequence:
                self._suspect(now)
                if record.joining and not record.has_joined and self._asker is None:
                    self._asker = record
        elif isinstance(message, Joining):
            record.joining, record.joining_since = message, now
        elif isinstance(message, Joined):
            record.has_joined = True
        elif isinstance(message, Leaving):
            record.is_leaving, record.leaving_status = True, message.status
            if message.status:
                self._suspect(now)
        elif isinstance(message, Overdue):
            if record.overdue is None and self._asker is None:
                self._asker = record
            record.overdue = message
        elif isinstance(message, StatusReply):
            record.told = message

    def must_query(self, now: float) -> bool:
        """Whether all ranks are to be asked now. True once."""
        if self._asker is None:
            self._asker = next((r for r in self._records if _is_late(r, now)), None)
        if self._asker is None or self._asked_at is not None:
            return False
        self._asked_at = now
        return True

    def must_end(self, now: float) -> bool:
        """Whether the job has to end. While ranks are asked about a hang it does not."""
        if any(record.failed_at is not None for record in self._records):
            return True
        if self._asked_at is not None:
            return self._is_answered(now)
        since = self._suspicious_since
        return since is not None and now - since >= _CAUSE_S

    def _is_answered(self, now: float) -> bool:
        asker = self._asker
        if self._asked_at is None or asker is None:
            return False
        is_complete = all(r.told is not None or r.has_ended for r in self._records)
        if not is_complete and now - self._asked_at < _ANSWERS_S:
            return False
        if self.hang is None:
            told = {r.rank: said for r in self._records if (said := _last_told(r)) is not None}
            hosts = {r.rank: r.host for r in self._records}
            if asker.overdue is not None:
                self.hang = report(asker.overdue, asker.rank, told, hosts)
            elif asker.joining is not None:
                on_the_way = [r.rank for r in self._records if r.joining or r.has_joined]
                self.hang = report_of_joining(asker.joining, on_the_way, told, hosts)
        return True

    def _suspect(self, now: float) -> None:
        if self._suspicious_since is None:
            self._suspicious_since = now


def _is_late(record: RankRecord, now: float) -> bool:
    """Whether it has been joining the others for too long."""
    if record.joining is None or record.joining_since is None or record.has_joined:
        return False
    return now - record.joining_since >= record.joining.limit_s


def _last_told(record: RankRecord) -> StatusReply | None:
    """What it has told; where it has ended, that."""
    if record.exit is not None and not record.follows:
        return StatusReply(state=f"has ended with exit code {record.exit.returncode}")
    if record.lost_at is not None:
        return StatusReply(state="is lost with its agent")
    if record.is_leaving:
        return StatusReply(state="has come to the end of its script")
    return record.told
