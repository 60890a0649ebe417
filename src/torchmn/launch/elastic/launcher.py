"""Run an elastic job: start the rendezvous and the hosts, show the ranks' output, bring hosts back.

What happens to the job is decided by the rendezvous (`rounds`). This process only reaches hosts,
listens to the ranks of the round that runs, and says at the end who was to blame.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from functools import partial

from torchmn.control import connection as channels
from torchmn.control.authenticated_listener import AuthenticatedListener, connect_authenticated
from torchmn.control.connection import Channel
from torchmn.control.messages.elastic import (
    HostLost,
    HostUnreachable,
    JobEnded,
    LauncherHello,
    Round,
    RoundEnding,
    Stop,
    UserMessage,
)
from torchmn.control.processes import signal_name
from torchmn.errors import LaunchError
from torchmn.exit_status import SAVED_STATUS, shell_code
from torchmn.launch.console import RankOutput
from torchmn.launch.elastic.host import round_secret
from torchmn.launch.elastic.host_processes import HostProcesses
from torchmn.launch.elastic.job import ElasticJob, node_process, store_process
from torchmn.launch.elastic.rendezvous import ROLE
from torchmn.launch.elastic.round_session import RoundSession, num_ranks_of
from torchmn.launch.job import Command
from torchmn.launch.process_owner import ProcessOwner, start_process
from torchmn.monitor.job_result import JobResult
from torchmn.monitor.rank_session import write_failure_report

_STORE_START_S = 20.0
_MARGIN_S = 10.0
"""How much longer than the ranks' grace the hosts have to end by themselves."""


class ElasticLauncher:
    """Runs an elastic job to its end. It owns the process as the `Supervisor` does.

    ``address`` is one of ours that all hosts of the job reach.
    """

    def __init__(
        self, elastic: ElasticJob, screen: RankOutput, address: str, env: Mapping[str, str]
    ) -> None:
        self._elastic = elastic
        self._job = elastic.job
        self._screen = screen
        self._address = address
        self._env = env
        self._owner = ProcessOwner(screen)
        self._has_told_stop = False
        self._listener = channels.listen(address)
        names = [host.name for host in self._job.hosts]
        self._hosts = HostProcesses(names, self._part_of, self._job.log_dir)
        self._ranks: RoundSession | None = None
        self._store: subprocess.Popen[bytes] | None = None
        self._store_end: int | None = None
        self._rendezvous = ""
        self._has_lost_store = False
        self._channel: Channel | None = None
        self._end: str | None = None  # why the job ended, empty if it went well
        self._kill_at = float("inf")
        self._said: set[str] = set()

    def run(self) -> int:
        """Run to the common end, and return the job's exit code. Raises LaunchError."""
        try:
            channel = self._channel = self._start_store()
            while not self._is_over():
                if self._end is None and not self._has_told_stop:
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
        return self._report()

    def _start_store(self) -> Channel:
        """Start the rendezvous and connect to it."""
        command = store_process(self._elastic, self._env, self._address)
        log = self._job.log_dir / "launcher.log"
        self._store = start_process(command, log, stdout=subprocess.PIPE, keeps_stdin=True)
        if self._store.stdout is None:  # cannot be: it was asked for
            raise LaunchError("The rendezvous has no standard output.")
        said = _first_line(self._store.stdout.fileno(), _STORE_START_S)
        self._rendezvous = self._elastic.read_store_answer(said)
        identity = LauncherHello(pid=os.getpid())
        return connect_authenticated(
            self._rendezvous, secret=self._job.secret, role=ROLE, identity=identity
        )

    def _part_of(self, host: str) -> Command:
        return node_process(
            self._elastic,
            self._env,
            host,
            rendezvous=self._rendezvous,
            supervisor=channels.address_of(self._listener),
        )

    def _is_over(self) -> bool:
        """Whether the job has ended and nothing of it runs any more, or had its time."""
        is_quiet = self._hosts.are_gone and self._store is None
        return (self._end is not None and is_quiet) or time.monotonic() > self._kill_at

    # ---- what happens -------------------------------------------------------------------------

    def _wait(self, channel: Channel) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._owner, selectors.EVENT_READ, self._on_wakeup)
            if channel.is_open:
                hear = partial(self._on_rendezvous, channel)
                selector.register(channel, selectors.EVENT_READ, hear)
            if self._ranks is not None:
                self._ranks.register(selector)
            for key, _ in selector.select(0.2):
                key.data()

    def _on_wakeup(self) -> None:
        for pid, returncode in self._owner.reap():
            if self._store is not None and pid == self._store.pid:
                self._store, self._store_end = None, returncode
            ended = self._hosts.ended(pid, returncode)
            is_going_on = self._end is None and not self._has_told_stop
            if ended is not None and is_going_on and self._channel is not None:
                host, how = ended
                self._channel.post(HostUnreachable(host=host, text=how))
                self._say_once(f"{host} is not there ({how}); it is tried again and again.")

    def _on_rendezvous(self, channel: Channel) -> None:
        for message in channel.collect():
            if isinstance(message, Round) and not self._has_told_stop:
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
            elif isinstance(message, JobEnded):
                self._finish(message.text)
        if not channel.is_open and self._end is None:
            self._has_lost_store = True
            self._finish("")

    def _begin(self, found: Round) -> None:
        """A round begins: its ranks will connect_authenticated here, with a secret of their own."""
        if self._ranks is not None:
            self._say(self._why_again(self._ranks, found))
            self._ranks.close()
        for member in found.members:
            self._hosts.is_in(member.host)
        self._said.clear()
        secret = round_secret(self._job.secret, found.number)
        gate = AuthenticatedListener(self._listener.dup(), secret=secret, role=channels.SUPERVISOR)
        self._ranks = RoundSession(found, self._job, gate, self._screen)

    def _why_again(self, before: RoundSession, found: Round) -> str:
        """What ended the round before, and with whom and from where all go on."""
        why = found.reason
        if found.num_restarts > before.round.num_restarts:
            why = before.result().summary.rstrip(".") or why
            why += f"; restart {found.num_restarts} of {self._elastic.limits.max_restarts}"
        names = ", ".join(member.host for member in found.members)
        memory = f", in memory: step {found.restored.step}" if found.restored else ""
        return (
            f"{why}: {num_ranks_of(found)} worker(s) on {names} go on from the last "
            f"checkpoint{memory}."
        )

    # ---- what is done about it ----------------------------------------------------------------

    def _act(self, channel: Channel) -> None:
        ranks = self._ranks
        for signum in self._owner.take_signals_to_forward():
            if ranks is not None:
                ranks.forward_signal(signum)
        if ranks is not None:
            ranks.act()
        must_stop = self._owner.interrupted_by is not None or (
            ranks is not None and ranks.has_saved
        )
        if must_stop and not self._has_told_stop:
            self._has_told_stop = True
            channel.post(Stop(signum=self._owner.end_signal))
            self._kill_at = time.monotonic() + self._job.grace_s + 2 * _MARGIN_S
        channel.flush()

    def _finish(self, text: str) -> None:
        """The job is over: hosts end by themselves, and are killed if they do not in time."""
        if self._end is None:
            self._end = text
            self._kill_at = time.monotonic() + self._job.grace_s + _MARGIN_S
            if self._ranks is not None:
                self._ranks.disconnect_pending()

    def _say(self, text: str) -> None:
        self._screen.say(text)

    def _say_once(self, text: str) -> None:
        """Until the next round."""
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _report(self) -> int:
        """Say how the job ended, and whose fault it was; its exit code."""
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
        reason = self._loss_of_store() if self._has_lost_store else self._end or ""
        if not reason:
            return 0
        if self._has_lost_store or result.is_launcher_failure:  # ranks that we ended did not fail
            result = JobResult(exit_code=1)
        summary = " ".join([f"{reason[:1].upper()}{reason[1:]}.", result.summary]).rstrip()
        if ranks is not None:
            ranks.report_failure(self._job.log_dir, result, summary)
        else:
            write_failure_report(self._job.log_dir, result, summary)
        self._say(summary)
        return result.exit_code or 1

    def _loss_of_store(self) -> str:
        how = signal_name(self._store_end or 0)
        ended = f" (its process was ended by {how})" if how else ""
        return (
            f"the rendezvous at {self._rendezvous} was lost{ended}, which knows who takes part, so "
            "all workers were ended. Start the job again: it goes on from its last checkpoint"
        )


def _first_line(descriptor: int, limit_s: float) -> str:
    """The first line that a process writes; what there is of it when the limit is over."""
    said, deadline = b"", time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while b"\n" not in said and selector.select(max(0.0, deadline - time.monotonic())):
            chunk = os.read(descriptor, 1 << 12)
            if not chunk:
                break
            said += chunk
    return said.decode(errors="replace").partition("\n")[0]
