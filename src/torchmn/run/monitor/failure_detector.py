"""Detect from the reports of all ranks whether a job has failed or hangs, and so must end.

Used by the process that is connected to all ranks: the supervisor of ``torchmn run``, or under
another launcher the monitor server. It is given the time, and has no effects.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from torchmn.base.errors import SAVED_STATUS
from torchmn.control.hang_report import EARLY_END, HangReport, RankStatus, report, report_of_joining
from torchmn.control.messages import (
    AwaitsInput,
    Failed,
    Joined,
    Joining,
    Leaving,
    Message,
    Overdue,
    StatusReply,
)
from torchmn.control.processes import signal_name
from torchmn.run.monitor.job_result import RankRecord

_CAUSE_S = 1.0  # how much later a cause may be reported than its consequences
# How long a script may take to reply, and longer for each rank on its host: replies wait for a
# core. On two cores, with twenty other programs, the last of 64 took 1.0 s.
_REPLY_S, _REPLY_S_PER_RANK, _MAX_REPLY_S = 2.0, 0.01, 4.0
# How much longer the agents may take, and how long at most: with a grace period of 5 s a job that
# hangs then ends within 10 s of its limit.
_AGENT_MARGIN_S, _MAX_REPLIES_S = 1.0, 4.5


class FailureDetector:
    """Decides from ``records`` whether the job must end.

    ``now`` is in seconds, of the same monotonic clock in all calls.
    """

    def __init__(self, records: Sequence[RankRecord]) -> None:
        self._records = records
        self._suspicious_since: float | None = None
        self._queried_at: float | None = None
        self._reporter: RankRecord | None = None
        self.hang: HangReport | None = None

    def on_message(self, record: RankRecord, message: Message, now: float) -> None:
        """Record a report of a rank, or of its agent in its place."""
        if isinstance(message, Failed):
            before = record.failed
            if before is None:
                record.failed = message
            elif message.whole and message.is_consequence == before.is_consequence:
                # What was reported when the communicator broke now ends the script.
                record.failed = msgspec.structs.replace(message, at=before.at)
            if message.is_consequence:
                self._suspect(now)
                if record.joining and not record.has_joined and self._reporter is None:
                    self._reporter = record
        elif isinstance(message, Joining):
            record.joining, record.joining_since = message, now
        elif isinstance(message, Joined):
            record.has_joined = True
        elif isinstance(message, Leaving):
            record.is_leaving, record.leaving_status = True, message.status
            record.leaving_text = message.text
            if message.status not in (0, SAVED_STATUS):
                self._suspect(now)
        elif isinstance(message, Overdue):
            if record.overdue is None and self._reporter is None:
                self._reporter = record
            record.overdue = message
        elif isinstance(message, StatusReply):
            record.status_reply = message
        elif isinstance(message, AwaitsInput):
            record.awaits_input = message.begins
            for each in self._records:  # the time that a person takes does not count
                each.joining_since = now if each.joining is not None else None

    def must_query(self, now: float) -> bool:
        """Whether to request the status of all ranks now. True only once."""
        if self._reporter is None and not any(r.awaits_input for r in self._records):
            self._reporter = next((r for r in self._records if _is_late(r, now)), None)
        if self._reporter is None or self._queried_at is not None:
            return False
        self._queried_at = now
        self.forget_replies()
        return True

    def forget_replies(self) -> None:
        """Forget what ranks have replied: their status is requested again."""
        for record in self._records:
            record.status_reply = None

    @property
    def has_queried(self) -> bool:
        """Whether the status of all ranks was requested for the report of a hang."""
        return self._queried_at is not None

    @property
    def has_all_replies(self) -> bool:
        """Whether every rank has replied, or has ended."""
        return all(r.status_reply is not None or r.has_ended for r in self._records)

    @property
    def reply_limit_s(self) -> float:
        """Seconds that a script may take to reply to a request for its status."""
        num_on_host = max(Counter(record.host for record in self._records).values(), default=0)
        return min(_REPLY_S + _REPLY_S_PER_RANK * num_on_host, _MAX_REPLY_S)

    @property
    def replies_limit_s(self) -> float:
        """Seconds after which replies of scripts and agents are not waited for any more."""
        return min(self.reply_limit_s + _AGENT_MARGIN_S, _MAX_REPLIES_S)

    def must_end(self, now: float) -> bool:
        """Whether the job must end. False while replies about a hang are awaited."""
        if any(record.failed_at is not None for record in self._records):
            return True
        if self._queried_at is not None:
            return self._is_answered(now)
        # A consequence or an exit status may be reported before the failure that explains it.
        since = self._suspicious_since
        return since is not None and now - since >= _CAUSE_S

    def _is_answered(self, now: float) -> bool:
        reporter = self._reporter
        if self._queried_at is None or reporter is None:
            return False
        if not self.has_all_replies and now - self._queried_at < self.replies_limit_s:
            return False
        if self.hang is None:
            known = {r.rank: status for r in self._records if (status := status_of(r)) is not None}
            hosts = {r.rank: r.host for r in self._records}
            if reporter.overdue is not None:
                self.hang = report(reporter.overdue, reporter.rank, known, hosts)
            elif reporter.joining is not None:
                arrived = [r.rank for r in self._records if r.joining or r.has_joined]
                self.hang = report_of_joining(reporter.joining, arrived, known, hosts)
        return True

    def _suspect(self, now: float) -> None:
        if self._suspicious_since is None:
            self._suspicious_since = now


def _is_late(record: RankRecord, now: float) -> bool:
    """Whether a rank has waited for the others to join for longer than its limit."""
    if record.joining is None or record.joining_since is None or record.has_joined:
        return False
    return now - record.joining_since >= record.joining.limit_s


def status_of(record: RankRecord) -> RankStatus | None:
    """Return the latest status of a rank, None if nothing is known."""
    text = ""
    if record.exit is not None and not record.is_consequence:
        code = record.exit.returncode
        text = f"has ended with {signal_name(code) or f'exit code {code}'}"
        text += f" ({EARLY_END})" * record.has_left
    elif record.lost_at is not None:
        text = "is lost with its agent"
    elif record.is_leaving:
        text = f"has reached the end of its script ({EARLY_END})"
    if text:
        return RankStatus(text=text, is_halted=True)
    return None if record.status_reply is None else RankStatus.of(record.status_reply)
