"""Split a stream of bytes into lines that can be shown among those of other ranks."""

from __future__ import annotations

import re

_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]|\x1b[78]")
"""Escape sequences that move the cursor or erase: with several ranks they would overwrite lines
of others. Colours are kept."""

_MAX_LINE_BYTES = 1 << 16
_MAX_HISTORY_BYTES = 1 << 12


class LineSplitter:
    """Turns chunks into whole lines.

    A progress bar rewrites its line with carriage returns: of a finished line only the last state
    is kept, and `unfinished` is the state of the line that is being written.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that this chunk completes, without their ends."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _MAX_HISTORY_BYTES:
            last = self._rest.rstrip(b"\r").rfind(b"\r")
            self._rest = self._rest[max(0, last) :]
        if len(self._rest) > _MAX_LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        return [_last_state(line) for line in whole]

    @property
    def unfinished(self) -> str:
        """What the unfinished line shows now; empty if it is not a progress bar."""
        return _last_state(self._rest) if b"\r" in self._rest else ""

    def finish(self) -> list[str]:
        """The unfinished line at the end of the stream."""
        rest, self._rest = self._rest, b""
        return [_last_state(rest)] if rest else []


def _last_state(line: bytes) -> str:
    states = line.decode("utf-8", "replace").split("\r")
    return _MOVES.sub("", next((state for state in reversed(states) if state), ""))
