"""The rendezvous of an elastic job: carries messages between its hosts, the launcher and the rules.

Who does not know the job's secret is not heard. torch's own rendezvous over a TCPStore is not used:
who reaches its port can make every agent unpickle what he likes, and it compares the clocks of
different hosts to find out who is dead.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from functools import partial

from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.connection import UNREACHABLE, Channel
from torchmn.control.messages import Message
from torchmn.control.messages.elastic import (
    CheckpointSaved,
    FileHeld,
    HostFinished,
    HostHello,
    HostReady,
    HostUnreachable,
    LauncherHello,
    Stop,
)
from torchmn.launch.elastic.rendezvous_state import LAUNCHER, RendezvousState

ROLE = "rendezvous"
"""Whose gate it is, see `torchmn.control.authenticated_listener`."""
LAST_WORDS_S = 60.0


class Rendezvous:
    """Carries what hosts and launcher say to the `RendezvousState`, and its decisions to them."""

    def __init__(
        self, gate: AuthenticatedListener, rounds: RendezvousState, goodbye_s: float
    ) -> None:
        self._gate = gate
        self._rounds = rounds
        self._goodbye_s = goodbye_s
        self._channels: dict[str, Channel] = {}
        self._leave_at: float | None = None

    def run(self, stdin: int) -> None:
        """Serve until the job is over and everybody has hung up, or the launcher is gone."""
        while not self._is_over():
            with selectors.DefaultSelector() as selector:
                selector.register(stdin, selectors.EVENT_READ, None)
                selector.register(self._gate, selectors.EVENT_READ, lambda: None)
                for name, channel in self._channels.items():
                    events = selectors.EVENT_READ
                    if channel.pending_bytes:
                        events |= selectors.EVENT_WRITE
                    selector.register(channel, events, partial(self._on_channel, name, channel))
                for key, _ in selector.select(0.5):
                    if key.data is None:
                        if not os.read(stdin, 1 << 12):
                            return  # the launcher is gone, and all hear it from our end
                    else:
                        key.data()
            self._on_gate()
            for name in self._rounds.tick(time.monotonic()):
                self._hang_up(name)
            self._deliver()

    def _is_over(self) -> bool:
        if not self._rounds.is_over:
            return False
        if self._leave_at is None:
            self._leave_at = time.monotonic() + self._goodbye_s
        has_hosts = any(name != LAUNCHER for name in self._channels)
        return not has_hosts or time.monotonic() > self._leave_at

    def _on_gate(self) -> None:
        for channel, identity in self._gate.admit():
            if isinstance(identity, LauncherHello) and LAUNCHER not in self._channels:
                self._channels[LAUNCHER] = channel
            elif isinstance(identity, HostHello):
                self._admit(channel, identity)
            else:
                channel.close()

    def _admit(self, channel: Channel, member: HostHello) -> None:
        """A host that was not seen to leave, and is here again, has left before."""
        if member.host in self._channels:
            self._hang_up(member.host)
            self._rounds.lost(member.host, "it connected anew", time.monotonic())
            self._deliver()
        self._channels[member.host] = channel
        is_in = self._rounds.came(member)
        self._deliver()
        if not is_in:
            self._hang_up(member.host)

    def _on_channel(self, name: str, channel: Channel) -> None:
        if self._channels.get(name) is not channel:
            return  # an event before this one has replaced it
        channel.flush()
        for message in channel.collect():
            self._on_message(name, message)
        if not channel.is_open:
            self._hang_up(name)
            if name == LAUNCHER:
                self._rounds.stop(signal.SIGTERM)
            else:
                why = f"it {UNREACHABLE}" if channel.is_silent else "its connection was closed"
                self._rounds.lost(name, why, time.monotonic())
        self._deliver()

    def _on_message(self, name: str, message: Message) -> None:
        now = time.monotonic()
        if isinstance(message, HostUnreachable) and name == LAUNCHER:
            self._rounds.absent(message.host, now)
        elif isinstance(message, Stop) and name == LAUNCHER:
            self._rounds.stop(message.signum)
        elif name == LAUNCHER:
            return
        elif isinstance(message, HostReady):
            self._rounds.arrived(name, message.held, now)
        elif isinstance(message, FileHeld):
            self._rounds.stored(name, message, now)
        elif isinstance(message, CheckpointSaved):
            self._rounds.announced(message.step, now)
        elif isinstance(message, HostFinished):
            self._rounds.finished(name)

    def _deliver(self) -> None:
        for name, message in self._rounds.take_posts():
            channel = self._channels.get(name)
            if channel is not None:
                channel.post(message)

    def _hang_up(self, name: str) -> None:
        channel = self._channels.pop(name, None)
        if channel is not None:
            channel.close()
