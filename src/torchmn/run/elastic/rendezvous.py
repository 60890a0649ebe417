"""The rendezvous server of an elastic job: connects hosts and launcher with `RendezvousState`.

Clients must authenticate with the job's secret. torch's own rendezvous over a TCPStore is not used:
any client of its port can make every agent unpickle arbitrary data, and it compares the clocks of
different hosts to detect lost ones.

``python -m torchmn.run.elastic.rendezvous`` runs on the launcher's host, reads its order from
standard input, prints the address on which it listens, and ends with the job, or when its standard
input ends because the launcher died.
"""

import os
import selectors
import signal
import sys
import time
from functools import partial

from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.codec import Record, decode, encode
from torchmn.control.connection import UNREACHABLE, Channel, address_of, listen_on
from torchmn.control.heartbeat import Heartbeat, LoopClock, answer
from torchmn.control.messages import (
    Alive,
    CheckpointSaved,
    HeartbeatRequest,
    HostFinished,
    HostHello,
    HostReady,
    HostUnreachable,
    LauncherHello,
    Message,
    Stop,
)
from torchmn.run.elastic.rendezvous_state import LAUNCHER, Limits, RendezvousState

ROLE = "rendezvous"  # the role of this listener, see `torchmn.control.authenticated_listener`
GOODBYE_S = 60.0


class Rendezvous:
    """Passes messages of hosts and launcher to the `RendezvousState`, and its decisions to them."""

    def __init__(
        self, listener: AuthenticatedListener, state: RendezvousState, goodbye_s: float
    ) -> None:
        self._listener = listener
        self._state = state
        self._goodbye_s = goodbye_s
        self._channels: dict[str, Channel] = {}
        self._leave_at: float | None = None
        self._clock = LoopClock()
        self._heartbeats: dict[str, Heartbeat] = {}

    def run(self, stdin: int) -> None:
        """Serve until the job is over and all clients have left, or the launcher is gone."""
        while not self._is_over():
            with selectors.DefaultSelector() as selector:
                selector.register(stdin, selectors.EVENT_READ, None)
                selector.register(self._listener, selectors.EVENT_READ, lambda: None)
                for name, channel in self._channels.items():
                    events = selectors.EVENT_READ
                    if channel.pending_bytes:
                        events |= selectors.EVENT_WRITE
                    selector.register(channel, events, partial(self._on_channel, name, channel))
                for key, _ in selector.select(0.5):
                    if key.data is None:
                        if not os.read(stdin, 1 << 12):
                            return  # the launcher is gone; all clients notice that we are
                    else:
                        key.data()
            self._accept()
            self._check_heartbeats(self._clock.tick())
            for name in self._state.tick(time.monotonic()):
                self._disconnect(name)
            self._deliver()

    def _is_over(self) -> bool:
        if not self._state.is_over:
            return False
        if self._leave_at is None:
            self._leave_at = time.monotonic() + self._goodbye_s
        has_hosts = any(name != LAUNCHER for name in self._channels)
        return not has_hosts or time.monotonic() > self._leave_at

    def _accept(self) -> None:
        for channel, identity in self._listener.admit():
            if isinstance(identity, LauncherHello) and LAUNCHER not in self._channels:
                self._channels[LAUNCHER] = channel
            elif isinstance(identity, HostHello):
                self._admit(channel, identity)
            else:
                channel.close()

    def _admit(self, channel: Channel, member: HostHello) -> None:
        """A host that connects again has lost its previous connection."""
        if member.host in self._channels:
            self._disconnect(member.host)
            self._state.on_host_lost(member.host, "it connected again", time.monotonic())
            self._deliver()
        self._channels[member.host] = channel
        self._heartbeats[member.host] = Heartbeat(channel)
        is_in = self._state.on_host_joined(member)
        self._deliver()
        if not is_in:
            self._disconnect(member.host)

    def _on_channel(self, name: str, channel: Channel) -> None:
        if self._channels.get(name) is not channel:
            return  # an event before this one has replaced it
        channel.flush()
        for message in channel.collect():
            self._on_message(name, message)
        if not channel.is_open:
            self._disconnect(name)
            if name == LAUNCHER:
                self._state.stop(signal.SIGTERM)
            else:
                why = f"it {UNREACHABLE}" if channel.is_silent else "its connection was closed"
                self._state.on_host_lost(name, why, time.monotonic())
        self._deliver()

    def _on_message(self, name: str, message: Message) -> None:
        now = time.monotonic()
        if isinstance(message, HeartbeatRequest):
            answer(self._channels[name])
        elif isinstance(message, Alive):
            self._heartbeats[name].answered()
        elif isinstance(message, HostUnreachable) and name == LAUNCHER:
            self._state.on_host_unreachable(message.host, now)
        elif isinstance(message, Stop) and name == LAUNCHER:
            self._state.stop(message.signum)
        elif isinstance(message, CheckpointSaved) and name == LAUNCHER:
            self._state.on_checkpoint_saved(message.step, now)
        elif name == LAUNCHER:
            return
        elif isinstance(message, HostReady):
            self._state.on_host_ready(name, now)
        elif isinstance(message, HostFinished):
            self._state.on_host_finished(name)

    def _check_heartbeats(self, now: float) -> None:
        """Disconnect hosts whose process is stopped. The launcher may be: nothing waits for it."""
        for name, beat in list(self._heartbeats.items()):
            silent_s = beat.silent_s(now)
            if silent_s >= beat.limit_s:
                self._disconnect(name)
                why = f"its process has not answered for {silent_s:.0f} s: it is stopped or hangs"
                self._state.on_host_lost(name, why, time.monotonic())

    def _deliver(self) -> None:
        for name, message in self._state.drain_messages():
            channel = self._channels.get(name)
            if channel is not None:
                channel.post(message)

    def _disconnect(self, name: str) -> None:
        self._heartbeats.pop(name, None)
        channel = self._channels.pop(name, None)
        if channel is not None:
            channel.close()


class ServeRendezvous(Record, frozen=True, kw_only=True):
    """To `torchmn.run.elastic.rendezvous`: listen here. It prints a `RendezvousStarted`."""

    secret: str
    host: str
    hosts: list[str]
    limits: Limits


class RendezvousStarted(Record, frozen=True, kw_only=True):
    """The address of the rendezvous and its process, or why it could not listen."""

    address: str = ""
    pid: int = 0
    error: str = ""


def main() -> int:
    """Serve one job."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # the launcher decides what to do
    order = decode(sys.stdin.readline(), ServeRendezvous)
    try:
        listener = listen_on(order.host)
    except OSError as error:
        _print(RendezvousStarted(error=str(error.strerror or error)))
        return 1
    authenticated = AuthenticatedListener(listener, secret=order.secret, role=ROLE)
    _print(RendezvousStarted(address=address_of(listener), pid=os.getpid()))
    state = RendezvousState(order.hosts, order.limits, now=time.monotonic())
    Rendezvous(authenticated, state, goodbye_s=order.limits.grace_s + GOODBYE_S).run(
        sys.stdin.fileno()
    )
    authenticated.close()
    return 0


def _print(reply: RendezvousStarted) -> None:
    print(encode(reply).decode(), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
