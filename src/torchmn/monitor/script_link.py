"""The agent's end of the connection to its script: words go up, questions go down.

The other end is `ScriptMonitor`, in the script. A script that does not answer is looked at from outside.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from torchmn.control.connection import Channel
from torchmn.control.messages import (
    Failed,
    Joined,
    Joining,
    Leaving,
    Message,
    Overdue,
    StatusReply,
    StatusRequest,
)
from torchmn.control.processes import state_of

_ANSWER_S = 2.0
_OF_SCRIPTS = (Failed, Joined, Joining, Leaving, Overdue, StatusReply)


class ScriptLink:
    """A connection to one script. ``tell`` takes what is to be passed on to the others.

    Without a ``connection`` there will be one when the script accepts the `invitation`.
    """

    def __init__(
        self, tell: Callable[[Message], None], connection: socket.socket | None = None
    ) -> None:
        self._others: socket.socket | None = None
        if connection is None:
            connection, self._others = socket.socketpair()
        self._channel = Channel(connection)
        self._tell = tell
        self._pid = 0
        self.answer_by: float | None = None
        """When somebody has asked: by when the script must have answered."""

    @property
    def is_open(self) -> bool:
        """Whether the script, or a process of its, may still speak."""
        return self._channel.is_open

    def fileno(self) -> int:
        """For selectors."""
        return self._channel.fileno()

    def invitation(self) -> str:
        """What the script finds in its environment."""
        if self._others is None:
            return ""
        self._others.set_inheritable(True)
        return f"{self._others.fileno()}:{os.getpid()}"

    def begin(self, pid: int) -> None:
        """The script runs as this process and holds its end."""
        self._pid = pid
        if self._others is not None:
            self._others.close()

    def post(self, message: Message) -> None:
        """Tell the script something."""
        self._channel.post(message)

    def ask(self) -> None:
        """What is the script doing? The answer is passed on."""
        self.answer_by = time.monotonic() + _ANSWER_S
        self._channel.post(StatusRequest())

    def pass_on(self) -> None:
        """Pass on what the script has said."""
        self._channel.flush()
        for message in self._channel.collect():
            if isinstance(message, StatusReply):
                self.answer_by = None
            if isinstance(message, _OF_SCRIPTS):
                self._tell(message)

    def answer_if_silent(self) -> None:
        """Answer in the place of a script that had its time."""
        if self.answer_by is not None and time.monotonic() >= self.answer_by:
            self.answer_by = None
            state = state_of(self._pid) or "cannot be looked at on this system"
            self._tell(StatusReply(state=f"does not answer: its process {state}"))
