"""The ranks of one round of an elastic job, as the launcher hears them."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.connection import Channel
from torchmn.control.messages import (
    AgentHello,
    Exit,
    ForwardSignal,
    LogWarning,
    Message,
    Output,
    Refresh,
    StartRefused,
    StartScript,
    StatusRequest,
    Terminate,
)
from torchmn.control.messages.elastic import Round
from torchmn.exit_status import SAVED_STATUS
from torchmn.launch.console import RankOutput
from torchmn.launch.job import Job
from torchmn.monitor.failure_detector import FailureDetector
from torchmn.monitor.job_result import HANG_FILE, JobResult, RankRecord, summarize


@dataclass
class _Line:
    """A connection to the agent of a rank."""

    channel: Channel
    record: RankRecord
    hello: AgentHello
    has_order: bool = False


class RoundSupervisor:
    """Gives the ranks of a round their orders, shows what they say, and ends them together.

    The agents connect_authenticated at ``gate``, which is this round's. ``show`` is how anything reaches the
    screen.
    """

    def __init__(
        self,
        found: Round,
        job: Job,
        gate: AuthenticatedListener,
        screen: RankOutput,
        show: Callable[[partial[None]], None],
    ) -> None:
        self.round = found
        self._job = job
        self._gate = gate
        self._screen = screen
        self._show = show
        self._records = [RankRecord(rank) for rank in range(num_ranks_of(found))]
        self._watch = FailureDetector(self._records)
        self._lines: list[_Line] = []
        self._has_ended = False

    @property
    def log_dir(self) -> Path:
        """Where the output of these ranks is."""
        return self._job.log_dir / f"round{self.round.number}"

    @property
    def have_saved(self) -> bool:
        """Whether they saved and left before the job's time was over."""
        exits = [record.exit for record in self._records if record.exit is not None]
        return any(each.returncode == SAVED_STATUS for each in exits)

    def verdict(self, interrupted_by: int | None = None) -> JobResult:
        """Who was to blame for the end of this round."""
        return summarize(
            self._records,
            log_dir=self.log_dir,
            interrupted_by=interrupted_by,
            hang=self._watch.hang,
        )

    def register(self, selector: selectors.BaseSelector) -> None:
        """Let the selector call us when there is something to hear."""
        selector.register(self._gate, selectors.EVENT_READ, self._admit)
        for line in self._lines:
            if line.channel.is_open:
                selector.register(line.channel, selectors.EVENT_READ, partial(self._hear, line))

    def act(self) -> None:
        """Let visitors in, and end all ranks if one has failed or hangs."""
        self._admit()
        now = time.monotonic()
        if self._watch.must_query(now):
            for line in self._lines:
                line.channel.post(StatusRequest())
        if self._watch.must_end(now) and not self._has_ended:
            self._has_ended = True
            if self._watch.hang is not None:
                self._show(partial(self._screen.quote, self._watch.hang.text))
                self.keep(self.log_dir / HANG_FILE, self._watch.hang.text)
            for line in self._lines:
                line.channel.post(Terminate(signum=signal.SIGTERM))

    def pass_on(self, signum: int) -> None:
        """Tell the scripts of a scheduler's signal; they go on."""
        for line in self._lines:
            if line.has_order:
                line.channel.post(ForwardSignal(signum=signum))

    def call_off(self) -> None:
        """Hang up on agents that still wait for the others: they will not come."""
        self._hang_up(line for line in self._lines if not line.has_order)

    def lose(self, host: str) -> None:
        """Hang up on the ranks of a host, whose agents then end them, should they still run."""
        first = 0
        for member in self.round.members:
            ranks = range(first, first + int(member["slots"]))
            first = ranks.stop
            if member["host"] == host:
                self._hang_up(line for line in self._lines if line.record.rank in ranks)

    def close(self) -> None:
        """Hang up on everybody."""
        self._hang_up(self._lines)
        self._gate.close()

    def keep(self, path: Path, text: str) -> None:
        """Write a file beside the logs; a full disk costs the file only."""
        try:
            path.write_text(text)
        except OSError as error:
            self._show(partial(self._screen.say, f"cannot write {path}: {error}"))

    # ---- what they say ------------------------------------------------------------------------

    def _admit(self) -> None:
        for channel, message in self._gate.admit():
            taken = {line.record.rank for line in self._lines}
            ranks = range(len(self._records))
            if (
                not isinstance(message, AgentHello)
                or message.rank not in ranks
                or message.rank in taken
            ):
                channel.close()
                continue
            line = _Line(channel, self._records[message.rank], message)
            line.record.host = message.host
            self._lines.append(line)
            if len(self._lines) == len(self._records):
                self._order_all()

    def _order_all(self) -> None:
        """All ranks are there, so it is known where rank 0 is."""
        leader = next(line.hello for line in self._lines if line.hello.rank == 0)
        for line in self._lines:
            line.has_order = True
            line.channel.post(
                StartScript(
                    argv=list(self._job.argv),
                    cwd=str(self._job.cwd),
                    log_dir=str(self.log_dir.absolute()),
                    grace_s=self._job.grace_s,
                    wants_refreshes=self._screen.shows_bars,
                    script=self._job.script,
                    env={"MASTER_ADDR": leader.address, "MASTER_PORT": str(leader.port)},
                )
            )

    def _hear(self, line: _Line) -> None:
        for message in line.channel.collect():
            self._on_message(line, message)
        if line.channel.is_open:
            line.channel.flush()
        elif not line.record.has_ended:
            line.record.lost_at = time.time()

    def _on_message(self, line: _Line, message: Message) -> None:
        record = line.record
        if isinstance(message, Output):
            record.num_lines += len(message.lines)
            if message.stream == "err":
                record.last_errors.extend(message.lines)
            self._show(partial(self._screen.lines, record.rank, message.stream, message.lines))
        elif isinstance(message, Exit):
            record.exit = message
            line.channel.close()
        elif isinstance(message, StartRefused):
            text = f"rank {record.rank} on {record.host}: {message.text}"
            self._show(partial(self._screen.say, text))
        elif isinstance(message, Refresh):
            self._show(partial(self._screen.refresh, record.rank, message.text))
        elif isinstance(message, LogWarning):
            self._show(partial(self._screen.say, f"rank {record.rank}: {message.text}"))
        else:
            self._watch.hear(record, message, time.monotonic())

    def _hang_up(self, lines: Iterable[_Line]) -> None:
        for line in lines:
            line.channel.close()
            if not line.record.has_ended and line.has_order:
                line.record.lost_at, line.record.was_ending = time.time(), True


def num_ranks_of(found: Round) -> int:
    """How many ranks a round has."""
    return sum(int(member["slots"]) for member in found.members)
