"""Ranks that need different times for their parts, and wait for each other without a limit.

A rank with an empty shard is done at once, one with a large shard after minutes; the time limit of
a collective is neither's business. So ranks at work let the others know every quarter of it, and
all hear at once when one fails.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchmn.errors import CommunicationError

if TYPE_CHECKING:
    from torchmn.communicators import Communicator

_WORKING, _DONE, _FAILED = "working", "done", "failed"


class HeartbeatGather:
    """The end of a piece of work that every rank does. All ranks make one alike.

    ``what`` names the work in messages. Every rank calls `beat` as often as it likes between two
    steps of the work, then either `finish` or `fail` once.
    """

    def __init__(self, comm: Communicator, what: str) -> None:
        self._comm = comm
        self._what = what
        self._last_s = time.monotonic()

    def beat(self) -> None:
        """Say that this rank is at work, if it is time to.

        Raises CommunicationError: another rank failed.
        """
        if time.monotonic() - self._last_s > self._comm.timeout_s / 4:
            self._round(_WORKING, None)

    def finish(self, value: object) -> list[Any]:
        """Give a value and wait for those of all ranks, in rank order.

        Raises CommunicationError: another rank failed; the sentence names it and says how.
        """
        while True:
            said = self._round(_DONE, value)
            if all(state == _DONE for state, _ in said):
                return [theirs for _, theirs in said]

    def fail(self, error: Exception) -> None:
        """Let the other ranks know of an error of this one, which the caller then raises.

        Nothing is said about an error of communication: the others have their own.
        """
        if isinstance(error, CommunicationError):
            return
        with suppress(CommunicationError):  # what the caller raises matters more
            self._comm.allgather_obj((_FAILED, f"{type(error).__name__}: {error}"))

    def _round(self, state: str, value: object) -> list[tuple[str, Any]]:
        said = self._comm.allgather_obj((state, value))
        self._last_s = time.monotonic()
        for rank, (theirs, text) in enumerate(said):
            if theirs == _FAILED:
                raise CommunicationError(
                    f"{self._comm.rank_label}: {self._what} stopped, because rank {rank} raised {text}"
                )
        return said
