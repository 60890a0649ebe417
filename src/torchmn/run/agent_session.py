"""The agents of the ranks of one job: start their scripts, show their output, end them together.

Used by the supervisor of a job, and for every round of an elastic job.
"""

import os
import signal
import socket
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torchmn.base.private_files import make_private_folder, open_private
from torchmn.cluster.units import counted, listed
from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.connection import Channel
from torchmn.control.hang_report import HangReport
from torchmn.control.messages import (
    AgentHello,
    AwaitsInput,
    ForwardSignal,
    LogWarning,
    Message,
    Output,
    PreemptionNotice,
    Refresh,
    ScriptStarted,
    Shown,
    StartRefused,
    StartScript,
)
from torchmn.control.processes import send_group
from torchmn.run.console import RankOutput
from torchmn.run.host_checks import differences
from torchmn.run.job import Job, time_to_save
from torchmn.run.monitor.job_result import JobResult, RankRecord
from torchmn.run.monitor.rank_session import (
    RankConnection,
    RankSession,
    stderr_tail,
    write_failure_report,
    write_hang_report,
)
from torchmn.run.rank_environment import torchrun_variables

BINDING_FILE = "binding.txt"
"""File in the log folder with the cores, GPU, memory node and threads of each rank."""
_MAX_HANG_LINES = 200
_MAX_LAST_LINES = 20
"""Lines that a reader still sees when the job has ended."""


class AgentSession(RankSession):
    """Starts the scripts once the agents of all ranks have connected, and shows their output."""

    def __init__(
        self,
        listener: AuthenticatedListener,
        num_ranks: int,
        job: Job,
        log_dir: Path,
        output: RankOutput,
    ) -> None:
        super().__init__(listener, num_ranks, log_dir)
        self._job = job
        self._output = output
        self.variables: Mapping[str, str] = {}  # for all scripts
        self._problems: list[str] = []
        self._last_lines: deque[str] = deque(maxlen=_MAX_LAST_LINES)  # of all ranks
        self._local_ranks: dict[int, int] = {}  # known once the scripts start
        self.has_started = False  # whether the agents were ordered to start their scripts
        # Until when ranks may save and exit, of `clock`, once SIGTERM was received.
        self.leave_by: float | None = None

    def take_problems(self) -> list[str]:
        """Return the reasons why scripts could not be started since the last call."""
        problems, self._problems = self._problems, []
        return problems

    def admit(self, channel: Channel, identity: Message) -> bool:
        """Add an agent's connection as `RankSession` does; the last one starts all scripts."""
        if self.is_ending or not isinstance(identity, AgentHello):
            channel.close()
            return False
        is_admitted = super().admit(channel, identity)
        if is_admitted and self.is_complete:
            self._start_scripts()
        return is_admitted

    def _start_scripts(self) -> None:
        agents = [self.connections[rank].identity for rank in range(len(self.records))]
        hellos = [agent for agent in agents if isinstance(agent, AgentHello)]
        differing = differences({hello.host: hello.versions for hello in hellos})
        if differing:
            self._problems.append(
                f"hosts differ: {differing}; install the same versions on all of them"
            )
            return
        self.has_started = True
        # Only now is the host of rank 0 known, and with it the address where all ranks meet.
        job, first = self._job, hellos[0]
        rendezvous = {"MASTER_ADDR": first.address, "MASTER_PORT": str(first.port)}
        of_terminal = {**self.variables, **self._output.variables(job.num_ranks, os.environ)}
        variables = torchrun_variables([hello.host for hello in hellos])
        self._local_ranks = {i: int(own["LOCAL_RANK"]) for i, own in enumerate(variables)}
        for rank, own in enumerate(variables):
            self.connections[rank].channel.post(
                StartScript(
                    argv=list(job.argv),
                    cwd=str(job.cwd),
                    log_dir=str(self.log_dir.absolute()),
                    grace_s=job.grace_s,
                    signal_grace_s=job.signal_grace_s,
                    preemption=job.preemption,
                    wants_refreshes=self._output.shows_bars,
                    script=job.script,
                    env={**own, **rendezvous, **of_terminal},
                )
            )

    def on_message(self, connection: RankConnection, message: Message) -> None:
        """Show output and warnings; pass other messages to `RankSession`."""
        record = connection.record
        if isinstance(message, Output):
            connection.num_unshown_bytes += message.num_bytes
            self._on_output(record, message)
        elif isinstance(message, ScriptStarted):
            connection.script_pid = message.pid
            self._write_binding(_binding(record, message))
        elif isinstance(message, StartRefused):
            self._problems.append(f"rank {record.rank} on {record.host}: {message.text}")
        elif isinstance(message, Refresh):
            connection.num_unshown_bytes += len(message.text)
            if self._shows(record):
                self._output.refresh(record.rank, message.text)
        elif isinstance(message, AwaitsInput):
            super().on_message(connection, message)
            self._output.prompting = record.rank if message.begins else None
        elif isinstance(message, PreemptionNotice):
            self._output.say(f"{record.host} will be preempted: {message.text}.")
        elif isinstance(message, LogWarning):
            self._output.say_once(f"rank {record.rank}: {message.text}")
        else:
            super().on_message(connection, message)
            if record.has_ended and self._output.prompting == record.rank:
                self._output.prompting = None

    def _write_binding(self, text: str) -> None:
        """Append a line to `BINDING_FILE`; a full disk costs the line, not the job."""
        with suppress(OSError):
            make_private_folder(self.log_dir)
            with open(self.log_dir / BINDING_FILE, "a", opener=open_private) as file:
                file.write(f"{text}\n")

    def _check_heartbeats(self, now: float) -> None:
        """Skip the check until the scripts start: before, agents wait for their order only."""
        if self.has_started:
            super()._check_heartbeats(now)

    def on_launcher_stopped(self, text: str) -> None:
        """Record a problem, which ends the job as if a script could not be started."""
        self._problems.append(text)

    def _on_output(self, record: RankRecord, message: Output) -> None:
        record.num_lines += len(message.lines)
        if message.stream == "err":
            record.last_errors.extend(message.lines)
        if message.lines and self._shows(record):
            self._last_lines.extend(message.lines)
            self._output.lines(record.rank, message.stream, message.lines)

    def _shows(self, record: RankRecord) -> bool:
        shown = self._job.shown
        return shown is None or self._local_ranks.get(record.rank) in shown

    def accept(self) -> None:
        """As in `RankSession`; also acknowledge output, after which ranks may send more."""
        super().accept()
        # Agents send no more without it, so that a reader that pauses does not fill our memory.
        if self._output.has_room:
            for connection in self.connections.values():
                if connection.num_unshown_bytes:
                    connection.channel.post(Shown(num_bytes=connection.num_unshown_bytes))
                    connection.num_unshown_bytes = 0

    def on_lost(self, connection: RankConnection) -> None:
        """Kill the script of an agent that was lost, if it runs on this host."""
        if connection.script_pid and connection.record.host == socket.gethostname():
            send_group(connection.script_pid, signal.SIGKILL)

    @property
    def awaits_input(self) -> bool:
        """Whether a script waits for a person at the terminal."""
        return any(r.awaits_input and not r.has_ended for r in self.records)

    def forward_signal(self, signum: int) -> None:
        """Send all scripts a signal from outside the job, so that they can save and exit.

        Ctrl-C is for a script that awaits input: pdb interrupts a command and prompts again.
        """
        if not self.has_started:
            return
        if signum == signal.SIGINT:
            for each in self.connections.values():
                if each.record.awaits_input:
                    each.channel.post(ForwardSignal(signum=signum))
            return
        self.post(ForwardSignal(signum=signum))
        if signum == signal.SIGTERM and self.leave_by is None:
            self._output.say(time_to_save(signum, self._job.signal_grace_s))
            self.leave_by = self.clock.now + self._job.signal_grace_s

    def end(self, signum: int = signal.SIGTERM) -> HangReport | None:
        """End all scripts as `RankSession` does; show a hang report and write ``hang.txt``."""
        hang = super().end(signum)
        if hang is not None:
            lines = hang.short.rstrip("\n").split("\n")
            num_left = len(lines) - _MAX_HANG_LINES
            more = [f"... and {num_left} more lines"] if num_left > 0 else []
            self._output.quote("\n".join([*lines[:_MAX_HANG_LINES], *more]))
            self._say(write_hang_report(self.log_dir, hang.text))
        return hang

    def report_failure(self, folder: Path, result: JobResult, summary: str) -> None:
        """Show the error of the rank that failed first, and write ``failure.txt``."""
        self.show_error(result)
        self._say(write_failure_report(folder, result, summary, self._job.report))

    def show_error(self, result: JobResult) -> None:
        """Show the error of the rank that failed first, unless that was shown a few lines ago.

        If the result is no failure of a rank, the error that a rank has not printed is shown.
        """
        left = (each for each in self.records if each.is_unprinted and not each.is_consequence)
        first, tail = result.first_failure or next(left, None), stderr_tail(result)
        if first is not None and first.is_unprinted:
            self._output.lines(first.rank, "err", first.error_lines)
        elif first is not None and first.failed is not None and first.failed.whole:
            return  # it was printed by a hook of the script
        elif tail and tail[-1] not in self._last_lines:  # ranks that failed alike show it as well
            self._output.quote("\n".join(tail))

    def _say(self, text: str) -> None:
        if text:
            self._output.say(text)


def _binding(record: RankRecord, started: ScriptStarted) -> str:
    return (
        f"rank {record.rank} on {record.host}: {listed('core', started.cores)}, "
        + counted(started.num_threads, "thread")
        + (f", {started.beside}" if started.beside else "")
    )
