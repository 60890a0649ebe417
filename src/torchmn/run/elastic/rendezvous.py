"""The connections of an elastic job's hosts to its launcher, which asks `RendezvousState`.

Hosts must authenticate with the job's secret. torch's own rendezvous over a TCPStore is not used:
any client of its port can make every agent unpickle arbitrary data, and it compares the clocks of
different hosts to detect lost ones.
"""

import selectors
import signal

from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.connection import UNREACHABLE, Channel
from torchmn.control.heartbeat import Heartbeat
from torchmn.control.messages import (
    Alive,
    HostFinished,
    HostHello,
    HostLeaving,
    HostReady,
    JobOrder,
    Message,
    Shutdown,
)
from torchmn.run.elastic.rendezvous_state import Decision, RendezvousState

ROLE = "rendezvous"  # the role of this listener, see `torchmn.control.authenticated_listener`


class Rendezvous:
    """Passes messages from hosts to the `RendezvousState`, and its messages to the hosts.

    Each host that may take part gets the ``order`` first.
    """

    def __init__(
        self, listener: AuthenticatedListener, state: RendezvousState, order: JobOrder
    ) -> None:
        self._listener = listener
        self._state = state
        self._order = order
        self._channels: dict[str, Channel] = {}
        self._heartbeats: dict[str, Heartbeat] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `serve` has something to do."""
        number: int = self._selector.fileno()
        return number

    def serve(self, now: float) -> list[Decision]:
        """Serve hosts and enforce limits; return what the launcher must do. Call it often.

        ``now`` is the time of the same `LoopClock` in all calls.
        """
        for key, _ in self._selector.select(0):
            if key.data is not None and key.data in self._channels:
                self._receive(key.data, now)
        for channel, identity in self._listener.admit():
            if isinstance(identity, HostHello):
                self._admit(channel, identity, now)
            else:
                channel.close()
        self._check_heartbeats(now)
        for name in self._state.tick(now):
            self._disconnect(name)
        self._deliver()
        return self._state.drain_decisions()

    def close(self) -> None:
        """Disconnect all hosts, which end, and stop listening."""
        for name in list(self._channels):
            self._disconnect(name)
        self._selector.close()
        self._listener.close()

    def _admit(self, channel: Channel, member: HostHello, now: float) -> None:
        """Add a host's connection, unless it cannot take part.

        One that the launcher has started again has lost its previous connection.
        """
        name = member.host
        # Its old connection may take seconds to break, and must not speak for it any more.
        if name in self._channels and not member.joins:
            self._lose(name, "it connected again", now)
        problem = self._state.on_host_joined(member)
        if problem:
            # Closing sends what the socket takes, and a new socket takes a line: it learns why.
            channel.post(Shutdown(signum=signal.SIGTERM, text=problem))
            channel.close()
            return
        self._channels[name], self._heartbeats[name] = channel, Heartbeat(channel)
        self._selector.register(channel, selectors.EVENT_READ, name)
        channel.post(self._order)

    def _receive(self, name: str, now: float) -> None:
        channel = self._channels[name]
        for message in channel.collect():
            self._on_message(name, message, now)
        if not channel.is_open:
            why = f"it {UNREACHABLE}" if channel.is_silent else "its connection was closed"
            self._lose(name, why, now)

    def _on_message(self, name: str, message: Message, now: float) -> None:
        if isinstance(message, Alive):
            self._heartbeats[name].answered()
        elif isinstance(message, HostReady):
            self._state.on_host_ready(name, now)
        elif isinstance(message, HostLeaving):
            self._state.on_host_leaving(name, message.text)
        elif isinstance(message, HostFinished):
            self._state.on_host_finished(name)

    def _check_heartbeats(self, now: float) -> None:
        """Disconnect hosts whose process is stopped."""
        for name, beat in list(self._heartbeats.items()):
            silent_s = beat.silent_s(now)
            if silent_s >= beat.limit_s:
                why = f"its process has not answered for {silent_s:.0f} s: it is stopped or hangs"
                self._lose(name, why, now)

    def _lose(self, name: str, why: str, now: float) -> None:
        self._disconnect(name)
        self._state.on_host_lost(name, why, now)

    def _disconnect(self, name: str) -> None:
        channel = self._channels.pop(name)
        del self._heartbeats[name]
        self._selector.unregister(channel)
        channel.close()

    def _deliver(self) -> None:
        for name, message in self._state.drain_messages():
            # The same turn may have decided to restart a host and then have lost it.
            if name in self._channels:
                self._channels[name].post(message)
        for channel in self._channels.values():
            channel.flush()
