"""The control connections to all ranks of a job: which rank is connected, failed, hangs or ended.

The one control loop of a job. `torchmn run` runs it over its agents
(`torchmn.run.agent_session`), and the monitor server over the monitors beside ranks that another
launcher started. Nothing here starts, signals or reaps a process.
"""

import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torchmn.base.private_files import make_private_folder, write_whole
from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.connection import Channel
from torchmn.control.hang_report import HangReport
from torchmn.control.heartbeat import Heartbeat, LoopClock, answer
from torchmn.control.messages import (
    AgentHello,
    Alive,
    Exit,
    HeartbeatRequest,
    Message,
    MonitorHello,
    StatusRequest,
    StoppedProcess,
    Terminate,
)
from torchmn.control.processes import StoppedProcesses, ancestors, is_stopped
from torchmn.run.monitor.failure_detector import FailureDetector
from torchmn.run.monitor.inspections import Inspections
from torchmn.run.monitor.job_result import FAILURE_FILE, HANG_FILE, JobResult, RankRecord, summarize

STOPPED = "is stopped by a signal"
# How many limits an agent on this host may take that is not stopped: its disk may block it.
_BUSY_LIMITS = 4


@dataclass
class RankConnection:
    """The control connection of one rank; ``script_pid`` is 0 until its script has started.

    ``num_unshown_bytes`` is the size of the output that was not acknowledged yet, and ``stopped``
    has the processes that the agent reports as stopped.
    """

    channel: Channel
    record: RankRecord
    identity: AgentHello | MonitorHello
    script_pid: int = 0
    num_unshown_bytes: int = 0
    stopped: StoppedProcesses[StoppedProcess] = field(default_factory=StoppedProcesses)

    def __post_init__(self) -> None:
        self.heartbeat = Heartbeat(self.channel)
        if isinstance(self.identity, MonitorHello):
            self.script_pid = self.identity.pid


class RankSession:
    """Accepts the connections of all ranks and follows them to their end, in a single thread.

    A subclass handles further messages in `on_message`. Reports are written to ``log_dir``.
    """

    def __init__(self, listener: AuthenticatedListener, num_ranks: int, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.records = [RankRecord(rank) for rank in range(num_ranks)]
        self.detector = FailureDetector(self.records)
        self.connections: dict[int, RankConnection] = {}
        self.is_ending = False
        self.has_started = True  # whether connected ranks answer, which agents do not do at first
        self.inspections: Inspections | None = None
        """Answers `torchmn inspect`, if the owner of this session has made one."""
        self._listener = listener
        # Kept from one wait to the next: a loop that registered thousands of connections each time
        # that one of them is ready would do little else.
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self.accept)
        self.clock = LoopClock()

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have connected."""
        return len(self.connections) == len(self.records)

    @property
    def is_open(self) -> bool:
        """Whether any connection is open."""
        return any(each.channel.is_open for each in self.connections.values())

    # ---- incoming -----------------------------------------------------------------------------

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register the listener and all connections as one, with a callback as data."""
        selector.register(self._selector.fileno(), selectors.EVENT_READ, self._process_ready)

    def _process_ready(self) -> None:
        for key, _ in self._selector.select(0):
            key.data()

    def _close(self, channel: Channel) -> None:
        """Unregister a connection, before another one gets its descriptor, and close it."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(channel)
        channel.close()

    def accept(self) -> None:
        """Accept the clients that have authenticated, and send what is pending. Call it often."""
        for channel, identity in self._listener.admit():
            self.admit(channel, identity)
        # Channels are registered for reading only, so writing is tried again in each turn.
        for connection in self.connections.values():
            connection.channel.flush()
        if self.inspections is not None:
            self.inspections.serve(self)

    def admit(self, channel: Channel, identity: Message) -> bool:
        """Add a rank's connection; close it if the rank is unknown or connected already.

        Returns whether it was added.
        """
        if (
            not isinstance(identity, AgentHello | MonitorHello)
            or identity.rank not in range(len(self.records))
            or identity.rank in self.connections
        ):
            channel.close()
            return False
        record = self.records[identity.rank]
        record.host = identity.host
        connection = self.connections[identity.rank] = RankConnection(channel, record, identity)
        self._selector.register(channel, selectors.EVENT_READ, partial(self.receive, connection))
        if self.is_ending:  # it missed the message to all
            channel.post(Terminate(signum=signal.SIGTERM))
        return True

    def receive(self, connection: RankConnection) -> None:
        """Process the messages of a rank, and record the loss of its connection."""
        channel, record = connection.channel, connection.record
        for message in channel.collect():
            self.on_message(connection, message)
        channel.flush()
        if channel.is_open:
            return
        self._close(channel)
        if not record.has_ended:
            record.lost_at = time.time()
            record.is_silent = channel.is_silent
            record.was_ending = self.is_ending  # then its end is not a failure
            self.on_lost(connection)

    def on_message(self, connection: RankConnection, message: Message) -> None:
        """Process one message of a rank."""
        if isinstance(message, Exit):
            connection.record.exit = message
        elif isinstance(message, HeartbeatRequest):
            answer(connection.channel)
        elif isinstance(message, Alive):
            connection.heartbeat.answered()
            connection.stopped.update(message.stopped, self.clock.now)
        else:
            self.detector.on_message(connection.record, message, self.clock.now)

    def on_lost(self, connection: RankConnection) -> None:
        """Called once after the connection of a rank that has not ended was lost."""

    # ---- outgoing -----------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """Send a message to all connected ranks."""
        for connection in self.connections.values():
            connection.channel.post(message)

    def must_end(self, now: float) -> bool:
        """Whether a rank has failed or hangs, so that all must end; ``now`` is of `clock`.

        If one seems to hang, the status of all ranks is requested first.
        """
        if not self.is_ending:
            self._check_heartbeats(now)
        if self.detector.must_query(now):
            self.post(StatusRequest(limit_s=self.detector.reply_limit_s))
        return self.detector.must_end(now)

    def end(self, signum: int = signal.SIGTERM) -> HangReport | None:
        """Tell all agents to end their scripts with a signal; return the hang report, if any."""
        self.is_ending = True
        self.post(Terminate(signum=signum))
        return self.detector.hang

    def disconnect(self, connections: Iterable[RankConnection]) -> None:
        """Close connections; agents whose scripts still run then end them."""
        for connection in connections:
            self._close(connection.channel)
            if not connection.record.has_ended:
                connection.record.lost_at, connection.record.was_ending = time.time(), True

    def close(self) -> None:
        """Close all connections and the listener."""
        self.disconnect(self.connections.values())
        self._selector.close()
        self._listener.close()

    # ---- processes that are stopped -----------------------------------------------------------

    def _check_heartbeats(self, now: float) -> None:
        """Give up ranks whose script or agent is stopped, or whose agent does not answer."""
        for connection in self.connections.values():
            record, beat = connection.record, connection.heartbeat
            if record.has_ended or not connection.channel.is_open:
                continue
            silent_s = beat.silent_s(now)
            if silent_s >= beat.limit_s and (text := self._describe_silence(connection, silent_s)):
                self._close(connection.channel)
                record.lost_at, record.lost_text = time.time(), text
                self.on_lost(connection)
            for process in connection.stopped.for_longer_than(beat.limit_s, now):
                self._on_stopped(connection, process)

    def _describe_silence(self, connection: RankConnection, silent_s: float) -> str:
        """Describe why the agent is silent; empty if its host may just be busy."""
        identity, host = connection.identity, connection.record.host
        if isinstance(identity, AgentHello):
            what, pid = "agent", identity.pid
        else:
            what, pid = "monitor", identity.monitor_pid
        silence = f"has not answered for {silent_s:.0f} s"
        others = [each for each in self.connections.values() if each.record.host == host]
        reported = {process.pid for each in others for process in each.stopped}
        is_here = host == socket.gethostname()
        if pid in reported or (is_here and is_stopped(pid)):
            silence = STOPPED
        elif is_here and silent_s < _BUSY_LIMITS * connection.heartbeat.limit_s:
            return ""
        return f"its {what} (process {pid}) {silence}"

    def _on_stopped(self, reporter: RankConnection, process: StoppedProcess) -> None:
        """Record that a process on the host of ``reporter`` was stopped for too long."""
        here = [c for c in self.connections.values() if c.record.host == reporter.record.host]
        for connection in here:
            if connection.script_pid == process.pid and connection.record.stopped_at is None:
                connection.record.stopped_at = time.time()
                connection.record.stopped_text = f"its process {process.pid} {STOPPED}"
            if process.pid in (connection.script_pid, connection.identity.pid):
                return  # an agent is noticed by its own silence
        if process.pid not in (os.getpid(), *ancestors(os.getpid())):
            self.on_launcher_stopped(
                f"{process.name} (process {process.pid} on {reporter.record.host}) {STOPPED}"
            )

    def on_launcher_stopped(self, text: str) -> None:
        """Called when a process of the launcher, between this one and an agent, is stopped."""

    # ---- result -------------------------------------------------------------------------------

    @property
    def result(self) -> partial[JobResult]:
        """`summarize` for these ranks, to be called with its other arguments."""
        hang = self.detector.hang
        return partial(summarize, self.records, log_dir=self.log_dir, hang=hang)


def write_hang_report(folder: Path, text: str) -> str:
    """Write ``hang.txt``; return the problem if it cannot be written, else an empty string."""
    return _write(folder / HANG_FILE, text)


def write_failure_report(
    folder: Path, result: JobResult, summary: str, short: Path | None = None
) -> str:
    """Write ``failure.txt``: the whole traceback, or the end of stderr, then the summary.

    The file ``short`` has no more of the error than the terminal shows. Returns the problem if they
    cannot be written, such as a full disk, else an empty string.
    """
    first, tail = result.first_failure, stderr_tail(result)
    whole = first.failed.whole.splitlines() if first is not None and first.failed else []
    problem = _write(folder / FAILURE_FILE, "\n".join([*(whole or tail), summary, ""]))
    if short is not None:
        problem = _write(short, "\n".join([*tail, summary, ""])) or problem
    return problem


def stderr_tail(result: JobResult) -> list[str]:
    """Return a title and the end of stderr of the rank that failed first; may be empty."""
    first = result.first_failure
    lines = first.error_lines if first is not None else []
    return [f"End of stderr of rank {first.rank}:", *lines] if first and lines else []


def _write(path: Path, text: str) -> str:
    try:
        make_private_folder(path.parent)
        write_whole(path, text.encode(errors="replace"))
    except OSError as error:
        return f"cannot write {path}: {error}"
    return ""
