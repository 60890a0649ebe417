"""Run the commands of a job until all of them have ended, and report the result."""

import math
import selectors
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torchmn.base.errors import SAVED_STATUS
from torchmn.cluster.units import listed
from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.heartbeat import heartbeat_limit_s
from torchmn.control.processes import StoppedProcesses, is_stopped, send_group, signal_name
from torchmn.run.agent_session import AgentSession
from torchmn.run.backend import remove_abandoned
from torchmn.run.child_processes import ProcessOwner, start_process
from torchmn.run.console import RankOutput
from torchmn.run.job import Command, Job
from torchmn.run.monitor.inspections import Inspections
from torchmn.run.monitor.rank_session import STOPPED

# How much longer than the ranks' grace period we wait before we kill the agents themselves.
_MARGIN_S = 3.0
_NUM_QUOTED_LINES = 40
_START_LIMIT_S = 60.0  # a rank whose agent does not connect within this time has not started


class Supervisor:
    """Starts commands whose agents connect to it, shows their output and ends them together.

    ``variables`` are set for all scripts, unless the environment of the job has them.
    Its `ProcessOwner` replaces signal handlers and reaps all children, so the process should do
    nothing else.
    """

    def __init__(
        self,
        job: Job,
        output: RankOutput,
        listener: AuthenticatedListener,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._job = job
        self._output = output
        self._owner = ProcessOwner(output)
        self._session = AgentSession(listener, job.num_ranks, job, job.log_dir, output)
        self._session.variables = variables or {}
        self._session.inspections = self._inspections = Inspections(job.log_dir)
        self._processes: dict[int, Command] = {}
        self._start_by = self._session.clock.now + _START_LIMIT_S
        self._kill_at = math.inf
        self._stopped = StoppedProcesses[int]()
        self._launcher_problem = ""
        self._launcher_returncode = 0

    @property
    def launcher_log(self) -> Path:
        """File with the output of launchers and agents, as opposed to that of scripts."""
        return self._job.log_dir / "launcher.log"

    def run(self, commands: Sequence[Command]) -> int:
        """Start the commands, wait until all have ended, and return the job's exit code."""
        try:
            for command in commands:
                process = start_process(command, self.launcher_log)
                self._processes[process.pid] = command
            while self._processes or self._session.is_open:
                self._wait()
                self._act()
        finally:
            self._owner.kill_all()
            # Only now are the agents of this host dead, and the locks of their folders free.
            if self._job.backend == "mpi":
                remove_abandoned()
            self._session.close()
            self._inspections.close()
            self._owner.close()
        code = self._report()
        self._owner.finish_output()
        return code

    def _wait(self) -> None:
        """Wait for messages, connections, the end of a process or a deadline, and handle them."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._owner, selectors.EVENT_READ, self._on_wakeup)
            self._session.register(selector)
            # Not longer: a deadline, or a process that is stopped, wakes nobody.
            for key, _ in selector.select(0.2):
                key.data()
        self._session.accept()

    def _on_wakeup(self) -> None:
        for pid, returncode in self._owner.reap():
            command = self._processes.pop(pid, None)
            if command is not None:
                self._on_process_end(command, returncode)

    def _on_process_end(self, command: Command, returncode: int) -> None:
        if returncode and not self._launcher_problem:  # else we have ended it
            self._launcher_returncode = self._launcher_returncode or returncode
        served = self._session.records
        if command.ranks is not None:
            served = served[command.ranks.start : command.ranks.stop]
        for record in served:
            # Its end may be known before that of the connection. Of a silent host we know neither:
            # we closed the connection ourselves.
            if record.exit is None and record.lost_returncode is None and not record.is_silent:
                record.lost_returncode = returncode
        if all(record.has_ended for record in served) or self._session.is_ending:
            return
        how = signal_name(returncode) or f"exit code {returncode}"
        is_running = any(record.rank in self._session.connections for record in served)
        when = "while its ranks were running" if is_running else "before its ranks had started"
        self._launcher_problem = f"{command.name} ended with {how} {when}"

    def _act(self) -> None:
        """End the job if it must end, disconnect ended ranks, and kill what exceeds its time."""
        session = self._session
        now = session.clock.tick()
        awaits_input = session.awaits_input
        for signum in self._owner.take_signals_to_forward(awaits_input=awaits_input):
            session.forward_signal(signum)
        self._check_launchers(now)
        for text in session.take_problems():
            self._launcher_problem = text
        if not session.is_ending:
            missing = [str(record.rank) for record in session.records if not record.host]
            if missing and now > self._start_by and not self._launcher_problem:
                self._launcher_problem = (
                    f"{listed('rank', missing)} did not start within {_START_LIMIT_S:g} s"
                )
            by = self._owner.interrupted_by
            is_interrupted = by is not None and (by != signal.SIGTERM or session.leave_by is None)
            if session.must_end(now) or self._launcher_problem or is_interrupted:
                self._end_all()
        connected = session.connections.values()
        all_have_ended = all(each.record.has_ended for each in connected)
        # the agent of a rank that failed or saved stays until the others have ended: mpirun would
        # kill them when it sees the exit status
        session.disconnect(
            each
            for each in connected
            if each.record.exit and (all_have_ended or each.record.exit.returncode == 0)
        )
        if all(record.has_ended for record in session.records):
            self._kill_within(self._job.grace_s)
        if session.leave_by is not None:
            self._kill_at = min(self._kill_at, session.leave_by + _MARGIN_S)
        if now > self._kill_at:
            for pid in self._processes:
                send_group(pid, signal.SIGKILL)
            self._owner.kill_all()

    def _check_launchers(self, now: float) -> None:
        """Record a problem if a launcher of several ranks, such as mpirun, stays stopped."""
        self._stopped.update((pid for pid in self._processes if is_stopped(pid)), now)
        for pid in self._stopped.for_longer_than(heartbeat_limit_s(), now):
            command = self._processes[pid]
            if command.ranks is None or len(command.ranks) > 1:
                self._launcher_problem = f"{command.name} (process {pid} on this host) {STOPPED}"

    def _kill_within(self, grace_s: float) -> None:
        self._kill_at = min(self._kill_at, self._session.clock.now + grace_s + _MARGIN_S)

    def _end_all(self) -> None:
        self._kill_within(self._job.grace_s)
        self._session.end(self._owner.end_signal)
        if not self._session.connections:  # no agent is there to be told
            for pid in self._processes:
                send_group(pid, signal.SIGTERM)

    def _report(self) -> int:
        result = self._session.result(
            interrupted_by=self._owner.interrupted_by,
            launcher_problem=self._launcher_problem,
            launcher_returncode=self._launcher_returncode,
        )
        records = self._session.records
        has_output = any(record.num_lines or record.is_unprinted for record in records)
        if result.is_launcher_failure or (result.exit_code and not has_output):
            with suppress(OSError):  # its folder may be gone
                lines = self.launcher_log.read_text(errors="replace").splitlines()
                if lines:
                    self._output.quote("\n".join(lines[-_NUM_QUOTED_LINES:]))
        if result.summary:
            if result.exit_code != SAVED_STATUS:
                self._session.report_failure(self._job.log_dir, result, result.summary)
            self._output.say(result.summary)
        return result.exit_code
