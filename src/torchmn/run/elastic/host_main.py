"""``python -m torchmn.run.elastic.host_main``: one host of an elastic job.

It connects to the launcher, and runs the agents of this host's ranks, round after round. It ends
with the job, with the launcher (the end of the connection or of standard input) and after a signal,
and kills all processes below it. The launcher starts it, with an order on the standard input, or
the user does on a host that joins (`torchmn.run.elastic.join`).
"""

import hashlib
import hmac
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Literal

from torchmn.base.errors import TorchmnError
from torchmn.base.terminal import say
from torchmn.cluster.environment_variables import JOB_VARIABLE, ROUND_VARIABLE, SECRET_VARIABLE
from torchmn.control.authenticated_listener import connect_authenticated
from torchmn.control.codec import Record, decode
from torchmn.control.connection import Channel
from torchmn.control.heartbeat import answer
from torchmn.control.messages import (
    HeartbeatRequest,
    HostFinished,
    HostHello,
    HostLeaving,
    HostReady,
    JobOrder,
    Restart,
    Round,
    Shutdown,
)
from torchmn.control.processes import (
    adopt_orphans,
    kill_descendants,
    reap_children,
    send,
    signal_name,
    signal_socket,
)
from torchmn.run.elastic.rendezvous import ROLE
from torchmn.run.host_checks import find_problem, versions
from torchmn.run.job import time_to_save, worker_command
from torchmn.run.preemption_notice import notice_now
from torchmn.run.rank_environment import rank_variables

_POLL_S = 0.2
_CONNECT_S = 10.0
_STOP_MARGIN_S = 3.0  # how much longer than its script an agent may take to end
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class RunHost(Record, frozen=True, kw_only=True):
    """Order to `torchmn.run.elastic.host_main`: take part in an elastic job as this host.

    ``node_rank`` and ``command`` are as in `HostHello`.
    """

    host: str
    slots: int
    secret: str
    rendezvous: str
    env: dict[str, str]
    node_rank: int | None = None
    command: str | None = None


def round_secret(secret: str, number: int) -> str:
    """Return the secret of a round, with which ranks of earlier rounds cannot authenticate."""
    return hmac.new(secret.encode(), f"round {number}".encode(), hashlib.sha256).hexdigest()


class Host:
    """Runs the agents of this host as the rendezvous requests. One thread."""

    def __init__(self, order: RunHost, channel: Channel, wakeup: socket.socket) -> None:
        self._order = order
        self._channel = channel
        self._wakeup = wakeup
        self._job: JobOrder | None = None  # until it has arrived
        self._state: Literal["waiting", "running", "finished"] = "waiting"
        self._agents: set[int] = set()  # their processes
        self._has_failed = False
        self._kill_at = math.inf  # when the agents, which were asked to end, are killed
        self._leave: Shutdown | None = None

    def run(self) -> Shutdown:
        """Take part until the end; return why this host has left."""
        while True:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wakeup, selectors.EVENT_READ, self._on_signals)
                # At their end they would be ready always.
                if self._leave is None and self._order.command is None:
                    selector.register(0, selectors.EVENT_READ, self._on_input)
                if self._channel.is_open:
                    selector.register(self._channel, selectors.EVENT_READ, self._on_messages)
                for key, _ in selector.select(_POLL_S):
                    key.data()
            self._channel.flush()
            if self._agents:
                self._enforce_end()
            elif self._leave is not None:
                return self._leave
            elif self._state == "running":
                self._round_ended()

    def _on_signals(self) -> None:
        for signum in self._wakeup.recv(64):
            if signum in _ENDING_SIGNALS and self._leave is None:
                self._leave_after(signum)
            elif signum == signal.SIGINT:
                self._kill_at = 0.0  # Ctrl-C while this host leaves: at once
        for pid, returncode in reap_children():
            if pid in self._agents:
                self._agents.discard(pid)
                self._has_failed |= returncode != 0

    def _on_input(self) -> None:
        if not os.read(0, 1 << 12):
            self._go(Shutdown(signum=signal.SIGTERM, text="the launcher died"))

    def _on_messages(self) -> None:
        for message in self._channel.collect():
            if isinstance(message, HeartbeatRequest):
                answer(self._channel)
            elif self._leave is not None:
                continue  # whatever it says, this host leaves, and its ranks may take long to save
            elif isinstance(message, JobOrder):
                self._begin(message)
            elif isinstance(message, Round):
                self._start(message)
            elif isinstance(message, Restart) and self._state == "finished":
                self._wait_for_round()
            elif isinstance(message, Restart):
                self._end_agents(signal.SIGTERM)
            elif isinstance(message, Shutdown):
                self._go(message)
        if not self._channel.is_open:
            text = "the launcher was lost: its process ended, or there is no route to it"
            self._go(Shutdown(signum=signal.SIGTERM, text=text))

    def _begin(self, job: JobOrder) -> None:
        """Take part, or leave if this host cannot run the job."""
        self._job = job
        os.environ.update(job.env)
        problem = find_problem(job.cwd, job.script) or notice_now(job.preemption)
        if problem:
            self._channel.post(HostLeaving(text=problem))
            self._go(Shutdown(signum=signal.SIGTERM, text=problem))
        else:
            self._wait_for_round()

    def _start(self, found: Round) -> None:
        slots = [member.slots for member in found.members]
        inter_rank = [member.host for member in found.members].index(self._order.host)
        secret = round_secret(self._order.secret, found.number)
        env = {**os.environ, SECRET_VARIABLE: secret, ROUND_VARIABLE: str(found.number)}
        self._state, self._has_failed, self._kill_at = "running", False, math.inf
        for intra_rank in range(slots[inter_rank]):
            agent = subprocess.Popen(
                worker_command(),
                env={**env, **rank_variables(slots, inter_rank, intra_rank)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C reaches us alone, who pass it on
            )
            agent.returncode = 0  # this class reaps; without it Popen would warn
            self._agents.add(agent.pid)

    def _enforce_end(self) -> None:
        if self._has_failed:
            self._end_agents(signal.SIGTERM)
        if time.monotonic() > self._kill_at:
            # The kernel kills their scripts with them, as each has asked it to.
            for pid in self._agents:
                send(pid, signal.SIGKILL)

    def _round_ended(self) -> None:
        """Report that all agents have ended: finished, or ready for another round."""
        if self._has_failed or self._kill_at < math.inf:
            self._wait_for_round()
        else:
            self._state = "finished"
            self._channel.post(HostFinished())

    def _wait_for_round(self) -> None:
        self._state = "waiting"
        self._channel.post(HostReady())

    def _end_agents(self, signum: int, grace_s: float | None = None) -> None:
        """Send the agents a signal, and kill them later: by default after a failure's grace."""
        if self._kill_at == math.inf and self._job is not None:
            grace_s = self._job.grace_s if grace_s is None else grace_s
            self._kill_at = time.monotonic() + grace_s + _STOP_MARGIN_S
            for pid in self._agents:
                send(pid, signum)

    def _leave_after(self, signum: int) -> None:
        """Leave the job after a signal to this host."""
        self._channel.post(HostLeaving(text=f"it received {signal_name(-signum)}"))
        self._leave = Shutdown(signum=signum, text="")
        if signum == signal.SIGHUP or self._job is None:
            self._end_agents(signum)
            return
        # Ctrl-C here does not end the job: the others go on from where all ranks have saved.
        say(time_to_save(signum, self._job.signal_grace_s))
        self._end_agents(signal.SIGTERM, self._job.signal_grace_s)

    def _go(self, leave: Shutdown) -> None:
        if self._leave is None:
            self._leave = leave
            self._end_agents(leave.signum)


def main() -> int:
    """Run this host's part of the job; the exit code is 0 if it ended regularly."""
    try:
        text = take_part(lambda: decode(sys.stdin.readline(), RunHost)).text
    except TorchmnError as error:
        text = str(error)
    if text:
        say(text)
    return 1 if text else 0


def take_part(find_order: Callable[[], RunHost]) -> Shutdown:
    """Run this host's part of a job; return why it has left.

    The ``text`` says why the job failed or continues without this host; it is empty if it ended
    regularly. The process can do nothing else afterwards. Raises LaunchError: the launcher does not
    answer, or does not know the secret.
    """
    adopt_orphans()
    # the launcher forwards SIGUSR1 and SIGUSR2, which are not ignored: that would be inherited
    wakeup = signal_socket(signal.SIGCHLD, *_ENDING_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
    try:
        order = find_order()
        os.environ.update(order.env)
        os.environ[JOB_VARIABLE] = hashlib.sha256(f"job {order.secret}".encode()).hexdigest()
        identity = HostHello(
            host=order.host,
            slots=order.slots,
            versions=versions(),
            node_rank=order.node_rank,
            command=order.command,
        )
        channel = connect_authenticated(
            order.rendezvous,
            secret=order.secret,
            role=ROLE,
            identity=identity,
            limit_s=_CONNECT_S,
        )
        return Host(order, channel, wakeup).run()
    finally:
        kill_descendants(os.getpid())


if __name__ == "__main__":
    sys.exit(main())
