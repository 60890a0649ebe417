"""Run an elastic job: start the rendezvous and the hosts, restart lost hosts, show the output.

The rendezvous decides what happens to the job (`rendezvous_state`). This process only starts hosts,
follows the ranks of the current round, and reports at the end what failed first.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchmn.base.errors import SAVED_STATUS, LaunchError, shell_code
from torchmn.cluster.units import counted
from torchmn.control import connection as channels
from torchmn.control.authenticated_listener import AuthenticatedListener, connect_authenticated
from torchmn.control.connection import Channel
from torchmn.control.heartbeat import Heartbeat, LoopClock
from torchmn.control.messages import (
    Alive,
    CheckpointSaved,
    HostLost,
    HostUnreachable,
    JobEnded,
    LauncherHello,
    Message,
    Round,
    RoundEnding,
    Stop,
    UserMessage,
)
from torchmn.control.processes import is_stopped, kill_descendants, send_group, signal_name
from torchmn.run.agent_session import AgentSession
from torchmn.run.child_processes import ProcessOwner, start_process
from torchmn.run.console import RankOutput
from torchmn.run.elastic.host import round_secret
from torchmn.run.elastic.job import ElasticJob, host_process, rendezvous_process
from torchmn.run.elastic.rendezvous import ROLE
from torchmn.run.job import Command, Job
from torchmn.run.monitor.job_result import JobResult, RankRecord
from torchmn.run.monitor.rank_session import STOPPED, RankConnection, write_failure_report

_RENDEZVOUS_START_S = 20.0
_MARGIN_S = 10.0  # how much longer than the ranks' grace period the hosts have to end by themselves


class ElasticLauncher:
    """Runs an elastic job to its end. It owns the process as the `Supervisor` does.

    ``address`` is one of this host that all hosts of the job can reach.
    """

    def __init__(
        self, elastic: ElasticJob, output: RankOutput, address: str, env: Mapping[str, str]
    ) -> None:
        self._elastic = elastic
        self._job = elastic.job
        self._output = output
        self._address = address
        self._env = env
        self._owner = ProcessOwner(output)
        self._has_stopped = False
        self._listener = channels.listen(address)
        names = [host.name for host in self._job.hosts]
        self._hosts = HostProcesses(names, self._host_command, self._job.log_dir)
        self._ranks: RoundSession | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._rendezvous_end: int | None = None
        self._rendezvous = ""
        self._has_lost_rendezvous = False
        self._channel: Channel | None = None
        self._clock = LoopClock()
        self._heartbeat: Heartbeat | None = None
        self._rendezvous_state = ""
        self._end: str | None = None  # why the job ended, empty if it went well
        self._kill_at = float("inf")
        self._shown: set[str] = set()

    def run(self) -> int:
        """Run until all hosts have ended, and return the job's exit code. Raises LaunchError."""
        try:
            channel = self._channel = self._start_rendezvous()
            while not self._is_over():
                if self._end is None and not self._has_stopped:
                    self._hosts.start_due()
                self._wait(channel)
                self._act(channel)
        finally:
            self._owner.kill_all()
            self._owner.reap()
            if self._ranks is not None:
                self._ranks.close()
            self._listener.close()
            if self._channel is not None:
                self._channel.close()
        code = self._report()
        self._owner.finish_output()
        return code

    def _start_rendezvous(self) -> Channel:
        """Start the rendezvous and connect to it."""
        command = rendezvous_process(self._elastic, self._env, self._address)
        log = self._job.log_dir / "launcher.log"
        self._server = start_process(command, log, stdout=subprocess.PIPE, keeps_stdin=True)
        if self._server.stdout is None:  # cannot be: it was asked for
            raise LaunchError("The rendezvous has no standard output.")
        line = _first_line(self._server.stdout.fileno(), _RENDEZVOUS_START_S)
        self._rendezvous = self._elastic.parse_address(line)
        identity = LauncherHello(pid=os.getpid())
        return connect_authenticated(
            self._rendezvous, secret=self._job.secret, role=ROLE, identity=identity
        )

    def _host_command(self, host: str) -> Command:
        return host_process(
            self._elastic,
            self._env,
            host,
            rendezvous=self._rendezvous,
            supervisor=channels.address_of(self._listener),
        )

    def _is_over(self) -> bool:
        """Whether the job has ended and nothing of it runs any more, or had its time."""
        is_quiet = self._hosts.are_gone and self._server is None
        return (self._end is not None and is_quiet) or time.monotonic() > self._kill_at

    # ---- what happens -------------------------------------------------------------------------

    def _wait(self, channel: Channel) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._owner, selectors.EVENT_READ, self._on_wakeup)
            if channel.is_open:
                receive = partial(self._on_rendezvous, channel)
                selector.register(channel, selectors.EVENT_READ, receive)
            if self._ranks is not None:
                self._ranks.register(selector)
            for key, _ in selector.select(0.2):
                key.data()

    def _on_wakeup(self) -> None:
        for pid, returncode in self._owner.reap():
            if self._server is not None and pid == self._server.pid:
                self._server, self._rendezvous_end = None, returncode
            ended = self._hosts.ended(pid, returncode)
            is_going_on = self._end is None and not self._has_stopped
            if ended is not None and is_going_on and self._channel is not None:
                host, how = ended
                self._channel.post(HostUnreachable(host=host, text=how))
                self._say_once(f"{host} cannot be reached ({how}); retrying.")

    def _on_rendezvous(self, channel: Channel) -> None:
        for message in channel.collect():
            if isinstance(message, Round) and not self._has_stopped:
                self._begin(message)
            elif isinstance(message, RoundEnding) and self._ranks is not None:
                self._ranks.disconnect_pending()
            elif isinstance(message, HostLost):
                self._say(f"{message.host} was lost: {message.text}")
                self._hosts.give_up(message.host, self._job.grace_s + _MARGIN_S)
                if self._ranks is not None:
                    self._ranks.drop_host(message.host)
            elif isinstance(message, UserMessage):
                self._say_once(message.text)
            elif isinstance(message, Alive) and self._heartbeat is not None:
                self._heartbeat.answered()
            elif isinstance(message, JobEnded):
                self._finish(message.text)
        if not channel.is_open and self._end is None:
            self._has_lost_rendezvous = True
            self._finish("")

    def _begin(self, found: Round) -> None:
        """A round begins: its ranks will connect here, with a secret of their own."""
        if self._ranks is not None:
            self._say(self._describe_restart(self._ranks, found))
            self._ranks.close()
        for member in found.members:
            self._hosts.has_joined(member.host)
        self._shown.clear()
        secret = round_secret(self._job.secret, found.number)
        listener = AuthenticatedListener(
            self._listener.dup(), secret=secret, role=channels.SUPERVISOR
        )
        self._ranks = RoundSession(
            found, self._job, listener, self._output, on_checkpoint=self._on_checkpoint
        )

    def _on_checkpoint(self, saved: CheckpointSaved) -> None:
        """Hosts that wait may join now."""
        if self._channel is not None:
            self._channel.post(saved)

    def _describe_restart(self, before: RoundSession, found: Round) -> str:
        """What ended the previous round, and with which hosts and checkpoint training continues."""
        why = found.reason
        if found.num_restarts > before.round.num_restarts:
            why = before.result().summary.rstrip(".") or why
            why += f"; restart {found.num_restarts} of {self._elastic.limits.max_restarts}"
        names = ", ".join(member.host for member in found.members)
        return (
            f"{why}: continuing with {counted(num_ranks_of(found), 'rank')} on {names} from the "
            "last checkpoint."
        )

    # ---- what is done about it ----------------------------------------------------------------

    def _act(self, channel: Channel) -> None:
        ranks = self._ranks
        for signum in self._owner.take_signals_to_forward():
            if ranks is not None:
                ranks.forward_signal(signum)
        self._check_rendezvous(channel)
        if ranks is not None:
            ranks.act()
        if not self._has_stopped and self._must_stop():
            self._has_stopped = True
            channel.post(Stop(signum=self._owner.end_signal))
            self._kill_at = time.monotonic() + self._job.grace_s + 2 * _MARGIN_S
        channel.flush()

    def _check_rendezvous(self, channel: Channel) -> None:
        """End the job if the process of the rendezvous is stopped."""
        now = self._clock.tick()
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(channel)
        if self._end is None and self._heartbeat.silent_s(now) >= self._heartbeat.limit_s:
            limit_s = self._heartbeat.limit_s
            self._rendezvous_state = f"its process has not answered for {limit_s:g} s"
            if self._server is not None and is_stopped(self._server.pid):
                self._rendezvous_state = f"its process {self._server.pid} {STOPPED}"
            self._has_lost_rendezvous = True
            channel.close()
            if self._server is not None:
                send_group(self._server.pid, signal.SIGKILL)  # at which the hosts end
            self._finish("")

    def _must_stop(self) -> bool:
        """Whether the job ends before its training: ranks saved, or a signal asks for it.

        After SIGTERM the ranks of the round first have time to save.
        """
        by, ranks = self._owner.interrupted_by, self._ranks
        if ranks is not None and ranks.has_saved:
            return True
        if by != signal.SIGTERM or ranks is None or ranks.leave_by is None:
            return by is not None
        return ranks.have_all_ended or ranks.clock.now > ranks.leave_by

    def _finish(self, text: str) -> None:
        """The job is over: hosts end by themselves, and are killed if they do not do so in time."""
        if self._end is None:
            self._end = text
            self._kill_at = time.monotonic() + self._job.grace_s + _MARGIN_S
            if self._ranks is not None:
                self._ranks.disconnect_pending()

    def _say(self, text: str) -> None:
        self._output.say(text)

    def _say_once(self, text: str) -> None:
        """Show a text once until the next round."""
        if text not in self._shown:
            self._shown.add(text)
            self._say(text)

    def _report(self) -> int:
        """Report how the job ended and what failed first. Returns its exit code."""
        ranks, signum = self._ranks, self._owner.interrupted_by
        result = (
            ranks.result(interrupted_by=signum) if ranks is not None else JobResult(exit_code=0)
        )
        if signum is not None and ranks is None:
            self._say(f"interrupted by {signal_name(-signum)} before a rank ran.")
            return shell_code(-signum)
        if signum is not None or result.exit_code == SAVED_STATUS:
            self._say(result.summary)
            return result.exit_code
        reason = self._rendezvous_loss() if self._has_lost_rendezvous else self._end or ""
        if not reason:
            return 0
        if (
            self._has_lost_rendezvous or result.is_launcher_failure
        ):  # ranks that we ended did not fail
            result = JobResult(exit_code=1)
        summary = " ".join([f"{reason[:1].upper()}{reason[1:]}.", result.summary]).rstrip()
        if ranks is not None:
            ranks.report_failure(self._job.log_dir, result, summary)
        else:
            write_failure_report(self._job.log_dir, result, summary)
        self._say(summary)
        return result.exit_code or 1

    def _rendezvous_loss(self) -> str:
        how = signal_name(self._rendezvous_end or 0)
        ended = f" (its process was ended by {how})" if how else ""
        if self._rendezvous_state:
            ended = f" ({self._rendezvous_state})"
        return (
            f"the rendezvous at {self._rendezvous} was lost{ended}, so all ranks were ended: the "
            "rendezvous is required. Start the job again: it continues from its last checkpoint"
        )


def _first_line(descriptor: int, limit_s: float) -> str:
    """The first line that a process writes, or what there is of it after ``limit_s``."""
    line, deadline = b"", time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while b"\n" not in line and selector.select(max(0.0, deadline - time.monotonic())):
            chunk = os.read(descriptor, 1 << 12)
            if not chunk:
                break
            line += chunk
    return line.decode(errors="replace").partition("\n")[0]


class RoundSession(AgentSession):
    """The agents of a round, which connect to the round's own ``listener``.

    Their output is in a folder of the round below the job's log folder. ``on_checkpoint`` is called
    when the ranks have finished a checkpoint.
    """

    def __init__(
        self,
        found: Round,
        job: Job,
        listener: AuthenticatedListener,
        output: RankOutput,
        *,
        on_checkpoint: Callable[[CheckpointSaved], None],
    ) -> None:
        log_dir = job.log_dir / f"round{found.number}"
        super().__init__(listener, num_ranks_of(found), job, log_dir, output)
        self.round = found
        self._on_checkpoint = on_checkpoint

    @property
    def has_saved(self) -> bool:
        """Whether the ranks saved and exited before the job's time limit."""
        return self.have_all_ended and any(map(_has_saved, self.records))

    @property
    def have_all_ended(self) -> bool:
        """Whether no rank of the round runs any more."""
        return all(record.has_ended for record in self.records)

    def act(self) -> None:
        """Accept connections, disconnect ended ranks, and end all if one has failed or hangs.

        While ranks leave by themselves none is disconnected, or torchrun's agent would start a
        round.
        """
        self.accept()
        is_leaving = self.leave_by is not None or any(map(_has_saved, self.records))
        if self.have_all_ended or not is_leaving:
            self.disconnect(each for each in self.connections.values() if each.record.exit)
        for text in self.take_problems():
            self._output.say(text)
        if not self.is_ending and self.must_end(self.clock.tick()):
            self.end()

    def on_message(self, connection: RankConnection, message: Message) -> None:
        """Pass finished checkpoints on; everything else as in `AgentSession`."""
        if isinstance(message, CheckpointSaved):
            self._on_checkpoint(message)
        else:
            super().on_message(connection, message)

    def on_launcher_stopped(self, text: str) -> None:
        """The process of a host: the rendezvous notices that it does not answer."""

    def disconnect_pending(self) -> None:
        """Disconnect agents that still wait for others, which will not connect."""
        if not self.has_started:
            self.disconnect(self.connections.values())

    def drop_host(self, host: str) -> None:
        """Disconnect the ranks of a host; agents that still run there end their scripts."""
        first = 0
        for member in self.round.members:
            ranks = range(first, first + member.slots)
            first = ranks.stop
            if member.host == host:
                self.disconnect(self.connections[r] for r in ranks if r in self.connections)


def _has_saved(record: RankRecord) -> bool:
    return record.exit is not None and record.exit.returncode == SAVED_STATUS


def num_ranks_of(found: Round) -> int:
    """The number of ranks of a round."""
    return sum(member.slots for member in found.members)


_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0


@dataclass
class _HostProcess:
    """One of them. ``pause_s`` is the time before the next attempt."""

    name: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    pause_s: float = _FIRST_PAUSE_S
    start_at: float = 0.0
    kill_at: float | None = None


class HostProcesses:
    """Starts all hosts, and restarts those that have ended, with growing pauses.

    ``command`` returns the command for a host's name; their output goes to files in ``log_dir``.
    """

    def __init__(self, names: list[str], command: Callable[[str], Command], log_dir: Path) -> None:
        self._command = command
        self._hosts = {name: _HostProcess(name, log_dir / f"host-{name}.log") for name in names}

    @property
    def are_gone(self) -> bool:
        """Whether none of them runs."""
        return not any(host.process for host in self._hosts.values())

    def start_due(self) -> None:
        """Start what is due, and kill what had its time."""
        now = time.monotonic()
        for host in self._hosts.values():
            if host.process is None and now >= host.start_at:
                host.process = start_process(self._command(host.name), host.log, keeps_stdin=True)
                host.kill_at = None
            elif host.process and host.kill_at is not None and now > host.kill_at:
                kill_descendants(host.process.pid, limit_s=1.0)
                send_group(host.process.pid, signal.SIGKILL)

    def ended(self, pid: int, returncode: int) -> tuple[str, str] | None:
        """A child has ended: which host that was, and how it went; it is started again later."""
        for host in self._hosts.values():
            if host.process is not None and host.process.pid == pid:
                _close(host.process)
                host.process = None
                host.start_at = time.monotonic() + host.pause_s
                host.pause_s = min(2 * host.pause_s, _MAX_PAUSE_S)
                how = signal_name(returncode) or f"exit code {returncode}"
                reason = _last_line(host.log)
                return host.name, f"{how}: {reason}" if reason else how
        return None

    def has_joined(self, name: str) -> None:
        """A host takes part: if it is lost, it is retried soon."""
        self._hosts[name].pause_s = _FIRST_PAUSE_S

    def give_up(self, name: str, kill_after_s: float) -> None:
        """A host was lost: its process here must end before it is started again."""
        host = self._hosts[name]
        if host.process is not None:
            _close(host.process)
            host.kill_at = time.monotonic() + kill_after_s


def _close(process: subprocess.Popen[bytes]) -> None:
    """End its standard input, at which it leaves."""
    if process.stdin is not None:
        process.stdin.close()


def _last_line(path: Path) -> str:
    """The last line of a log, for a message."""
    with suppress(OSError):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].removeprefix("torchmn: ").rstrip(".") if lines else ""
    return ""
