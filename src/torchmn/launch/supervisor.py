"""Run the commands of a job to their common end, whatever happens to any of them."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

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
    ScriptStarted,
    StartRefused,
    StartScript,
    StatusRequest,
    Terminate,
)
from torchmn.control.processes import (
    adopt_orphans,
    descendants,
    kill_descendants,
    reap_children,
    send_group,
    signal_name,
    signal_socket,
)
from torchmn.exit_status import SAVED_STATUS, shell_code
from torchmn.launch.console import RankOutput
from torchmn.launch.host_checks import differences
from torchmn.launch.job import Command, Job
from torchmn.monitor.failure_detector import FailureDetector
from torchmn.monitor.job_result import FAILURE_FILE, HANG_FILE, RankRecord, summarize

_MARGIN_S = 3.0
"""How much longer than the ranks' grace we wait before we kill the agents themselves."""
_NUM_QUOTED_LINES = 40
_NUM_HANG_LINES = 200


@dataclass
class _Line:
    """The connection to an agent."""

    channel: Channel
    record: RankRecord
    hello: AgentHello
    script_pid: int = 0


class Supervisor:
    """Starts commands whose agents report to it, shows their output and ends them together.

    The process that uses it becomes the parent of all orphans among its descendants, and its
    handlers of SIGINT, SIGTERM, SIGHUP and SIGCHLD are replaced: it should do nothing else.
    """

    def __init__(self, job: Job, screen: RankOutput, gate: AuthenticatedListener) -> None:
        self._job = job
        self._screen = screen
        self._records = [RankRecord(rank) for rank in range(job.num_ranks)]
        self._watch = FailureDetector(self._records)
        self._lines: list[_Line] = []
        self._processes: dict[int, Command] = {}
        self._bystanders = descendants(os.getpid())
        self._gate = gate
        self._wakeup = signal_socket(signal.SIGCHLD)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                signal.signal(signum, self._on_signal)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, self._on_notice)
        self._notices: list[int] = []
        self._interrupted_by: int | None = None
        self._start_by = time.monotonic() + job.start_limit_s
        self._kill_at: float | None = None
        self._is_ending = False
        self._launcher_problem = ""
        self._launcher_returncode = 0

    @property
    def launcher_log(self) -> Path:
        """The file with what launchers and agents say themselves."""
        return self._job.log_dir / "launcher.log"

    def run(self, commands: Sequence[Command]) -> int:
        """Start the commands, wait for the end of all, and return the job's exit code."""
        adopt_orphans()
        try:
            self._start(commands)
            while not self._is_over():
                self._wait()
                self._act()
        finally:
            kill_descendants(os.getpid(), spare=self._bystanders)
            for line in self._lines:
                line.channel.close()
        return self._report()

    def _start(self, commands: Sequence[Command]) -> None:
        with open(self.launcher_log, "wb") as log:
            for command in commands:
                process = subprocess.Popen(
                    command.argv,
                    env=command.env,
                    stdin=subprocess.PIPE if command.stdin else subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                process.returncode = 0  # this class reaps; without it Popen would warn
                self._processes[process.pid] = command
                if process.stdin is not None:
                    with suppress(BrokenPipeError), process.stdin:
                        process.stdin.write(command.stdin)

    def _is_over(self) -> bool:
        return not self._processes and not any(line.channel.is_open for line in self._lines)

    # ---- what happens -------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for messages, visitors, the end of processes or a deadline, and take note."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._gate, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ, self._on_wakeup)
            for line in self._lines:
                if line.channel.is_open:
                    selector.register(
                        line.channel, selectors.EVENT_READ, partial(self._on_line, line)
                    )
            for key, _ in selector.select(0.2):
                if key.data is not None:
                    key.data()
        for channel, message in self._gate.admit():
            self._admit(channel, message)

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        """Noted here, acted upon in the loop; a second Ctrl-C does not wait for anything."""
        if self._interrupted_by == signum == signal.SIGINT:
            kill_descendants(os.getpid(), spare=self._bystanders)
            os._exit(shell_code(-signum))
        self._interrupted_by = self._interrupted_by or signum

    def _on_notice(self, signum: int, _: FrameType | None) -> None:
        """The scheduler says that the end is near: the ranks are told, and go on."""
        self._notices.append(signum)

    def _on_wakeup(self) -> None:
        with suppress(BlockingIOError):
            self._wakeup.recv(64)
        for pid, returncode in reap_children():
            command = self._processes.pop(pid, None)
            if command is not None:
                self._on_end_of_process(command, returncode)

    def _on_end_of_process(self, command: Command, returncode: int) -> None:
        if returncode:
            self._launcher_returncode = self._launcher_returncode or returncode
        served = self._records
        if command.ranks is not None:
            served = served[command.ranks.start : command.ranks.stop]
        for record in served:
            # Its end may be known before that of the connection. Of a silent host we know neither:
            # there we have ended our own end.
            if record.exit is None and record.lost_returncode is None and not record.is_silent:
                record.lost_returncode = returncode
        if all(record.has_ended for record in served) or self._is_ending:
            return
        how = signal_name(returncode) or f"exit code {returncode}"
        is_running = any(line.record in served for line in self._lines)
        when = "while its ranks were running" if is_running else "before its ranks had started"
        self._launcher_problem = f"{command.name} ended with {how} {when}"

    def _on_line(self, line: _Line) -> None:
        for message in line.channel.collect():
            self._on_message(line, line.record, message)
            if line.channel.is_open:
                line.channel.flush()
        if not line.channel.is_open and not line.record.has_ended:
            line.record.lost_at = time.time()
            line.record.is_silent = line.channel.is_silent
            line.record.was_ending = self._is_ending
            if line.script_pid and line.record.host == socket.gethostname():
                send_group(line.script_pid, signal.SIGKILL)

    def _admit(self, channel: Channel, message: Message) -> None:
        """Take in who has passed the gate if it is an agent, its rank is free and nothing ends."""
        if (
            not isinstance(message, AgentHello)
            or message.rank not in range(self._job.num_ranks)
            or any(other.record is self._records[message.rank] for other in self._lines)
            or self._is_ending
        ):
            channel.close()
            return
        line = _Line(channel, self._records[message.rank], message)
        self._lines.append(line)
        line.record.host = message.host
        if all(record.host for record in self._records):
            self._order_all()

    def _order_all(self) -> None:
        """Give all agents their orders, now that all are there: where rank 0 is, is known."""
        job = self._job
        agents = {line.hello.rank: line for line in self._lines}
        hellos = {rank: line.hello for rank, line in sorted(agents.items())}
        differing = differences({h.host: h.versions for h in hellos.values()})
        if differing:
            self._launcher_problem = f"hosts differ: {differing}; install the same on all of them"
            return
        leader = hellos[0]
        for line in agents.values():
            line.channel.post(
                StartScript(
                    argv=list(job.argv),
                    cwd=str(job.cwd),
                    log_dir=str(job.log_dir.absolute()),
                    grace_s=job.grace_s,
                    wants_refreshes=self._screen.shows_bars,
                    script=job.script,
                    env={"MASTER_ADDR": leader.address, "MASTER_PORT": str(leader.port)},
                )
            )

    def _on_message(self, line: _Line, record: RankRecord, message: Message) -> None:
        if isinstance(message, Output):
            self._on_output(record, message)
        elif isinstance(message, Exit):
            record.exit = message
        elif isinstance(message, ScriptStarted):
            line.script_pid = message.pid
            if self._job.shows_binding:
                self._show(partial(self._screen.say, _binding(record, message)))
        elif isinstance(message, StartRefused):
            self._launcher_problem = f"rank {record.rank} on {record.host}: {message.text}"
        elif isinstance(message, Refresh):
            self._show(partial(self._screen.refresh, record.rank, message.text))
        elif isinstance(message, LogWarning):
            self._show(partial(self._screen.say, f"rank {record.rank}: {message.text}"))
        else:
            self._watch.hear(record, message, time.monotonic())

    def _on_output(self, record: RankRecord, message: Output) -> None:
        record.num_lines += len(message.lines)
        if message.stream == "err":
            record.last_errors.extend(message.lines)
            record.num_lines_of_others_since = 0
        for other in self._records:
            if other is not record:
                other.num_lines_of_others_since += len(message.lines)
        self._show(partial(self._screen.lines, record.rank, message.stream, message.lines))

    # ---- what is done about it ----------------------------------------------------------------

    def _act(self) -> None:
        """End the job if there is a reason to, hang up on who is done, kill who is too slow."""
        now = time.monotonic()
        while self._notices:
            signum = self._notices.pop(0)
            for line in self._lines:
                if line.script_pid:
                    line.channel.post(ForwardSignal(signum=signum))
        if not self._is_ending:
            unstarted = [r.rank for r in self._records if not r.host]
            if unstarted and now > self._start_by and not self._launcher_problem:
                self._launcher_problem = (
                    f"rank(s) {', '.join(map(str, unstarted))} did not start within "
                    f"{self._job.start_limit_s:g} s"
                )
            if self._watch.must_query(now):
                for line in self._lines:
                    line.channel.post(StatusRequest())
            must_end = self._watch.must_end(now)
            if must_end or self._launcher_problem or self._interrupted_by is not None:
                self._tell_of_hang()
                self._end_all()
        all_have_ended = all(line.record.has_ended for line in self._lines)
        for line in self._lines:
            ending = line.record.exit
            if ending and (all_have_ended or ending.returncode == 0):
                line.channel.close()
        if self._kill_at is None and all(record.has_ended for record in self._records):
            self._kill_at = now + self._job.grace_s + _MARGIN_S
        if self._kill_at is not None and now > self._kill_at:
            for pid in self._processes:
                send_group(pid, signal.SIGKILL)
            kill_descendants(os.getpid(), spare=self._bystanders)

    def _tell_of_hang(self) -> None:
        hang = self._watch.hang
        if hang is not None:
            *lines, _ = hang.text.split("\n")
            left = len(lines) - _NUM_HANG_LINES
            shown = [
                *lines[:_NUM_HANG_LINES],
                *([f"... and {left} more lines"] if left > 0 else []),
            ]
            self._show(partial(self._screen.quote, "\n".join(shown)))
            self._keep(HANG_FILE, hang.text)

    def _keep(self, name: str, text: str) -> None:
        """Write a file beside the logs; a full disk costs the file only."""
        path = self._job.log_dir / name
        try:
            path.write_text(text)
        except OSError as error:
            self._show(partial(self._screen.say, f"cannot write {path}: {error}"))

    def _end_all(self) -> None:
        self._is_ending = True
        self._kill_at = time.monotonic() + self._job.grace_s + _MARGIN_S
        signum = signal.SIGINT if self._interrupted_by == signal.SIGINT else signal.SIGTERM
        for line in self._lines:
            line.channel.post(Terminate(signum=signum))
        if not self._lines:
            for pid in self._processes:
                send_group(pid, signal.SIGTERM)

    def _show(self, write: partial[None]) -> None:
        """Write to the screen; a reader who left (``| head``) ends the job like a signal."""
        try:
            write()
        except BrokenPipeError:
            self._interrupted_by = self._interrupted_by or signal.SIGPIPE
            self._screen.close()

    def _report(self) -> int:
        verdict = summarize(
            self._records,
            log_dir=self._job.log_dir,
            interrupted_by=self._interrupted_by,
            launcher_problem=self._launcher_problem,
            launcher_returncode=self._launcher_returncode,
            hang=self._watch.hang,
        )
        first_failure = verdict.first_failure
        if first_failure and first_failure.num_lines_of_others_since and first_failure.last_errors:
            words = [f"The last words of rank {first_failure.rank}:", *first_failure.error_lines]
            self._show(partial(self._screen.quote, "\n".join(words)))
        is_silent = not any(record.num_lines for record in self._records)
        if verdict.is_launcher_failure or (verdict.exit_code and is_silent):
            lines = self.launcher_log.read_text(errors="replace").splitlines()
            if lines:
                self._show(partial(self._screen.quote, "\n".join(lines[-_NUM_QUOTED_LINES:])))
        if verdict.sentence:
            words = first_failure.error_lines if first_failure else []
            if verdict.exit_code != SAVED_STATUS:
                self._keep(FAILURE_FILE, "\n".join([*words, verdict.sentence]) + "\n")
            self._show(partial(self._screen.say, verdict.sentence))
        return verdict.exit_code


def _binding(record: RankRecord, started: ScriptStarted) -> str:
    cores = ",".join(map(str, started.cores))
    return (
        f"rank {record.rank} on {record.host}: core(s) {cores}, {started.num_threads} thread(s)"
        + (f", {started.beside}" if started.beside else "")
    )
