"""Run an elastic job: start the hosts, restart lost hosts, show the output.

`RendezvousState` decides what happens to the job. `ElasticLauncher` starts hosts, follows the ranks
of the current round, and reports at the end what failed first.
"""

import selectors
import signal
import socket
import time
from collections.abc import Mapping

from torchmn.base.errors import SAVED_STATUS, LaunchError, shell_code
from torchmn.cluster.network import is_this_host
from torchmn.cluster.units import counted
from torchmn.control import connection as channels
from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.heartbeat import LoopClock
from torchmn.control.messages import CheckpointSaved, Round
from torchmn.control.processes import signal_name
from torchmn.run.child_processes import ProcessOwner
from torchmn.run.console import RankOutput
from torchmn.run.elastic.host_main import round_secret
from torchmn.run.elastic.host_processes import HostProcesses
from torchmn.run.elastic.job import host_process, job_order, own_hello
from torchmn.run.elastic.rendezvous import ROLE, Rendezvous
from torchmn.run.elastic.rendezvous_state import (
    RANK_FAILED,
    Decision,
    HostLost,
    JobEnded,
    Limits,
    RendezvousState,
    RoundEnding,
    UserMessage,
)
from torchmn.run.elastic.round_session import RoundSession, num_ranks_of
from torchmn.run.job import Command, Job
from torchmn.run.monitor.inspections import Inspections
from torchmn.run.monitor.job_result import JobResult

_MARGIN_S = 10.0  # how much longer than the ranks' grace period the hosts have to end by themselves


class ElasticLauncher:
    """Runs an elastic job to its end; like the `Supervisor`, it needs the process for itself.

    ``address`` is an address of this host that all hosts of the job can reach.
    """

    def __init__(
        self, job: Job, limits: Limits, output: RankOutput, address: str, env: Mapping[str, str]
    ) -> None:
        self._job = job
        self._max_restarts = limits.max_restarts
        self._output = output
        self._env = env
        self._owner = ProcessOwner(output)
        self._clock = LoopClock()
        meeting = _meeting(job, address)
        self._listener = channels.listen_on(address)  # for the ranks of all rounds
        self._meeting_address = channels.address_of(meeting)
        names = [host.name for host in job.hosts]
        self._state = RendezvousState(
            names,
            limits,
            now=self._clock.now,
            own=own_hello(job),
        )
        self._rendezvous = Rendezvous(
            AuthenticatedListener(meeting, secret=job.secret, role=ROLE),
            self._state,
            job_order(job, env, channels.address_of(self._listener)),
        )
        self._hosts = HostProcesses(names, self._host_command, job.log_dir)
        self._inspections = Inspections(job.log_dir)
        # Before the first round there is one without ranks.
        self._ranks = self._session_of(Round(number=0, members=[], num_restarts=0, reason=""))
        self._end: str | None = None  # why the job ended, empty if it went well
        self._kill_at = float("inf")
        self._shown: set[str] = set()

    def run(self) -> int:
        """Run until all hosts have ended, and return the job's exit code."""
        try:
            while not self._is_over():
                if self._end is None:
                    self._note_unreachable(self._hosts.start_due())
                self._wait()
                self._act(self._clock.tick())
        finally:
            self._owner.kill_all()
            self._owner.reap()
            self._ranks.close()
            self._rendezvous.close()
            self._listener.close()
            self._inspections.close()
            self._owner.close()
        code = self._report()
        self._owner.finish_output()
        return code

    def _host_command(self, host: str) -> Command:
        return host_process(self._job, self._env, host, rendezvous=self._meeting_address)

    def _is_over(self) -> bool:
        """Whether the job has ended and no process is left, or the time to end is over."""
        has_ended = self._end is not None and self._hosts.are_gone
        return has_ended or time.monotonic() > self._kill_at

    # ---- what happens -------------------------------------------------------------------------

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._owner, selectors.EVENT_READ, self._on_wakeup)
            selector.register(self._rendezvous, selectors.EVENT_READ, lambda: None)
            self._ranks.register(selector)
            for key, _ in selector.select(0.2):
                key.data()

    def _on_wakeup(self) -> None:
        for pid, returncode in self._owner.reap():
            ended = self._hosts.ended(pid, returncode)
            if ended is not None and self._end is None and returncode != 0:
                self._note_unreachable([ended])

    def _note_unreachable(self, hosts: list[tuple[str, str]]) -> None:
        for host, why in hosts:
            self._state.on_host_unreachable(host, self._clock.now)
            self._say_once(f"{host} cannot be reached ({why}); retrying.")

    def _on_decision(self, decision: Decision) -> None:
        if isinstance(decision, Round):
            self._begin(decision)
        elif isinstance(decision, RoundEnding):
            self._ranks.disconnect_pending()
        elif isinstance(decision, HostLost):
            self._output.say(decision.text)
            self._hosts.give_up(decision.host, self._job.grace_s + _MARGIN_S)
            self._ranks.drop_host(decision.host)
        elif isinstance(decision, UserMessage):
            self._say_once(decision.text)
        elif isinstance(decision, JobEnded):
            self._finish(decision.text)

    def _begin(self, found: Round) -> None:
        """Begin a round, and say why the one before has ended."""
        if found.num_restarts > self._ranks.round.num_restarts:
            self._ranks.show_error(self._ranks.result())
        if self._ranks.round.number:
            self._output.say(self._describe_restart(self._ranks, found))
        self._ranks.close()
        for member in found.members:
            self._hosts.has_joined(member.host)
        self._shown.clear()
        self._ranks = self._session_of(found)

    def _session_of(self, found: Round) -> RoundSession:
        """Listen for the ranks of a round, which authenticate with the round's own secret."""
        secret = round_secret(self._job.secret, found.number)
        listener = AuthenticatedListener(
            # A duplicate: closing one round's listener leaves the port open for the next round.
            self._listener.dup(),
            secret=secret,
            role=channels.SUPERVISOR,
        )
        session = RoundSession(
            found,
            self._job,
            listener,
            self._output,
            on_checkpoint=self._on_checkpoint,
            on_notice=self._on_notice,
        )
        session.inspections = self._inspections
        return session

    def _on_checkpoint(self, saved: CheckpointSaved) -> None:
        """Let waiting hosts join, since all continue from this checkpoint."""
        self._state.on_checkpoint_saved(saved.step, self._clock.now)

    def _on_notice(self, host: str, text: str) -> None:
        """Continue without a host that will be preempted, unless it is the launcher's own."""
        # The connections of all hosts end with this process: no other one can go on without it.
        if is_this_host(host):
            self._output.say(f"{host}, the host of the launcher: {text}. All ranks save and exit.")
        else:
            self._state.on_host_leaving(host, text)

    def _describe_restart(self, before: RoundSession, found: Round) -> str:
        """Describe why the previous round ended and with which hosts training continues."""
        why = found.reason
        if found.num_restarts > before.round.num_restarts:
            why = before.result().summary.rstrip(".") or why
            why += f"; restart {found.num_restarts} of {self._max_restarts}"
        names = ", ".join(member.host for member in found.members)
        return (
            f"{why}: continuing with {counted(num_ranks_of(found), 'rank')} on {names} from the "
            "last checkpoint."
        )

    # ---- what is done about it ----------------------------------------------------------------

    def _act(self, now: float) -> None:
        for signum in self._owner.take_signals_to_forward():
            self._ranks.forward_signal(signum)
        self._ranks.act()
        if not self._state.is_over and self._must_stop():
            self._state.stop(self._owner.end_signal)
        for decision in self._rendezvous.serve(now):
            self._on_decision(decision)

    def _must_stop(self) -> bool:
        """Whether the job must end before its training does: ranks saved, or a signal came.

        After SIGTERM the ranks of the round first have time to save.
        """
        by, ranks = self._owner.interrupted_by, self._ranks
        if ranks.has_saved and not self._state.will_continue:
            return True
        if by != signal.SIGTERM or ranks.leave_by is None:
            return by is not None
        return ranks.have_all_ended or ranks.clock.now > ranks.leave_by

    def _finish(self, text: str) -> None:
        """Note that the job is over. Hosts end by themselves, or are killed after a while."""
        self._end = text
        self._kill_at = time.monotonic() + self._job.grace_s + _MARGIN_S
        self._ranks.disconnect_pending()

    def _say_once(self, text: str) -> None:
        """Show a text once until the next round."""
        if text not in self._shown:
            self._shown.add(text)
            self._output.say(text)

    def _report(self) -> int:
        """Report how the job ended and what failed first. Returns its exit code."""
        ranks, signum = self._ranks, self._owner.interrupted_by
        if signum is not None and not ranks.round.number:
            self._output.say(f"interrupted by {signal_name(-signum)} before a rank ran.")
            return shell_code(-signum)
        result = ranks.result(interrupted_by=signum)
        if signum is not None or result.exit_code == SAVED_STATUS:
            self._output.say(result.summary)
            return result.exit_code
        reason = self._end
        if not reason:
            return 0
        if result.is_launcher_failure:  # ranks that we ended did not fail
            result = JobResult(exit_code=1)
        summary = " ".join([f"{reason[:1].upper()}{reason[1:]}.", result.summary]).rstrip()
        if reason == RANK_FAILED and result.first_failure is not None:
            summary = result.summary  # which says more
        ranks.report_failure(self._job.log_dir, result, summary)
        self._output.say(summary)
        return result.exit_code or 1


def _meeting(job: Job, address: str) -> socket.socket:
    """Listen for the hosts of the job. Raises LaunchError: the user's address cannot be used."""
    if job.meeting is None:
        return channels.listen_on(address)
    host, port = job.meeting
    try:
        return channels.listen_on(host, port)
    except OSError as error:
        raise LaunchError(
            f"{socket.gethostname()} cannot wait for hosts at {host}:{port}: "
            f"{error.strerror or error}. If a job of another command waits there, give another "
            "--master-port on all hosts. For ranks on one machine run one command, with -n."
        ) from None
