"""Write a script's output to its log file at once, and send it as fast as it is shown.

The supervisor acknowledges what it has shown. No more than `_MAX_UNSHOWN_BYTES` are sent before
that: a connection whose reader does not read would look like one whose host is lost. The rest is
read again from the log file, so that the script never waits for whoever reads the job's output.
"""

from __future__ import annotations

import os
import re
import selectors
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from torchmn.base.private_files import make_private_folder, open_private
from torchmn.control.connection import Channel
from torchmn.control.messages import LogWarning, Output, Refresh, Stream

_MAX_UNSHOWN_BYTES = 1 << 14
# Of output that waits and is in no file: with more the script has to wait.
_MAX_MEMORY_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 13
_MAX_CHUNKS = 16
_REFRESH_PERIOD_S = 0.2
_URGENT_S = 2.0


@dataclass
class _Part:
    """Output that waits to be sent: ``data``, or if that is None a part of the log file."""

    stream: Stream
    num_bytes: int
    start: int = 0
    data: bytes | None = None


@dataclass
class ScriptOutput:
    """Reads the streams of a script, writes ``path`` and sends lines through ``channel``."""

    path: Path
    channel: Channel
    wants_refreshes: bool
    _log: IO[bytes] | None = None
    _log_bytes: int = 0
    _is_log_full: bool = False
    _pipes: dict[Stream, IO[bytes]] = field(default_factory=dict)
    _splitters: dict[Stream, LineSplitter] = field(default_factory=dict)
    _waiting: deque[_Part] = field(default_factory=deque)
    _num_unshown: int = 0
    _refreshed: str = ""
    _refreshed_at: float = 0.0
    refresh_at: float | None = None  # when a line that was begun is to be shown
    _num_prompted: int = -1
    _shown_at: float = 0.0

    def open_log(self) -> None:
        """Open the log file; without it the output is only sent."""
        try:
            make_private_folder(self.path.parent)  # another host's disk may lack it
            self._log = open(  # noqa: SIM115 - lives as long as the agent
                self.path, "w+b", buffering=0, opener=open_private
            )
        except OSError as error:
            self.channel.post(LogWarning(text=f"cannot write {self.path}: {error}"))

    def follow(self, stream: Stream, pipe: IO[bytes]) -> None:
        """Begin to read one of the script's streams from this pipe."""
        os.set_blocking(pipe.fileno(), False)
        self._pipes[stream] = pipe
        self._splitters[stream] = LineSplitter()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register the streams, each with its callback as data, unless too much is in memory."""
        if sum(len(part.data) for part in self._waiting if part.data) < _MAX_MEMORY_BYTES:
            for stream, pipe in self._pipes.items():
                selector.register(pipe, selectors.EVENT_READ, partial(self._on_readable, stream))

    def on_shown(self, num_bytes: int) -> None:
        """Note that the supervisor has shown this many bytes, and send more."""
        self._shown_at = time.monotonic()
        self._num_unshown = max(0, self._num_unshown - num_bytes)
        self.send()

    def send(self) -> None:
        """Send waiting output up to the limit of bytes that are not shown yet."""
        while self._waiting and self._num_unshown < _MAX_UNSHOWN_BYTES and self.channel.is_open:
            part = self._waiting[0]
            chunk = self._take(part)
            if not part.num_bytes:
                self._waiting.popleft()
            self._post(part.stream, self._splitters[part.stream].feed(chunk))
        self.refresh()

    def on_prompt(self, begins: bool) -> None:
        """Show the line that the script has begun, since it waits for an answer to it.

        Once it was answered the line is complete: the terminal has shown the answer.
        """
        splitter = self._splitters["out"]
        if begins:
            for stream in [*self._pipes]:
                self._on_readable(stream)
            if not self.wants_refreshes:
                self._post("out", splitter.finish())
            self.refresh(is_urgent=True)
            self._num_prompted = splitter.num_fed
        elif splitter.num_fed == self._num_prompted:
            splitter.finish()
            self._refreshed = ""

    def write_to_log(self, text: str) -> None:
        """Append text to the log after all that the script has printed, without sending it.

        Where there is no log it is sent.
        """
        if not text:
            return
        for stream in [*self._pipes]:
            self._read(stream, _MAX_CHUNKS)  # other processes may write without pause
        is_new_line = not self._log_bytes or self._read_log(self._log_bytes - 1, 1) == b"\n"
        data = ("" if is_new_line else "\n").encode() + f"{text}\n".encode(errors="replace")
        if self._write_log(data) is None:
            self._waiting.append(_Part("err", len(data), data=data))

    def drain(self, wait: Callable[[], None], *, is_urgent: bool) -> None:
        """Read what is left in the streams and send everything; ``wait`` waits for messages.

        With ``is_urgent``, at the end of an interrupted job, it stops waiting when the reader of
        the job's output pauses.
        """
        for stream in [*self._pipes]:
            while self._read(stream):
                pass
            if stream in self._pipes:  # a process outside our tree holds the other end
                self._on_chunk(stream, b"")
        self.send()
        self._shown_at = time.monotonic()
        while self._waiting and self.channel.is_open:
            if is_urgent and time.monotonic() - self._shown_at > _URGENT_S:
                return
            wait()
        for stream, splitter in self._splitters.items():
            self._post(stream, splitter.finish())
        if self._log is not None:
            self._log.close()

    def _on_readable(self, stream: Stream) -> None:
        self._read(stream)
        self.send()

    def _read(self, stream: Stream, num_chunks: int = 1) -> bool:
        """Read up to this number of chunks; return whether there may be more."""
        for _ in range(num_chunks):
            if stream not in self._pipes:  # it has ended
                return False
            try:
                chunk = os.read(self._pipes[stream].fileno(), 1 << 16)
            except BlockingIOError:
                return False
            self._on_chunk(stream, chunk)
        return True

    def _on_chunk(self, stream: Stream, chunk: bytes) -> None:
        """Write a chunk to the log and queue it to be sent; an empty one ends the stream."""
        if not chunk:
            self._pipes.pop(stream).close()
            return
        start = self._write_log(chunk)
        last = self._waiting[-1] if self._waiting else None
        if start is None:
            self._waiting.append(_Part(stream, len(chunk), data=chunk))
        elif (
            last is not None
            and last.data is None
            and last.stream == stream
            and last.start + last.num_bytes == start
        ):
            last.num_bytes += len(chunk)
        else:
            self._waiting.append(_Part(stream, len(chunk), start))

    def _write_log(self, chunk: bytes) -> int | None:
        """Append a chunk to the log; return its position, or None if it cannot be written.

        After the first error, such as a full disk, nothing more is written.
        """
        if self._log is None or self._is_log_full:
            return None
        start, rest = self._log_bytes, memoryview(chunk)
        try:
            while rest:  # an unbuffered file may take only a part
                rest = rest[self._log.write(rest) :]
        except OSError as error:
            text = f"stopped writing {self.path}: {error}"
            self.channel.post(LogWarning(text=text))
            self._is_log_full = True  # what waits is still read from it
            return None
        self._log_bytes += len(chunk)
        return start

    def _take(self, part: _Part) -> bytes:
        """Remove the next chunk from a part and return it."""
        num_bytes = min(part.num_bytes, _CHUNK_BYTES)
        if part.data is None:
            chunk = self._read_log(part.start, num_bytes)
        else:
            chunk, part.data = part.data[:num_bytes], part.data[num_bytes:]
        part.start += num_bytes
        part.num_bytes -= num_bytes
        return chunk

    def _read_log(self, start: int, num_bytes: int) -> bytes:
        try:
            chunk = os.pread(self._log.fileno(), num_bytes, start) if self._log else b""
        except OSError:
            chunk = b""
        missing = f"\ntorchmn: {num_bytes} bytes of output are lost: {self.path} was cut\n"
        return chunk if len(chunk) == num_bytes else missing.encode()

    def _post(self, stream: Stream, lines: list[str]) -> None:
        if lines:
            self._refreshed = ""  # the lines take its place
            num_bytes = sum(len(line) + 1 for line in lines)
            self._num_unshown += num_bytes
            self.channel.post(Output(stream=stream, lines=lines, num_bytes=num_bytes))

    def refresh(self, *, is_urgent: bool = False) -> None:
        """Send the line that was begun, unless other output waits or is not shown yet.

        A progress bar is sent once in a while, another line if it is not completed soon.
        """
        self.refresh_at = None
        if not self.wants_refreshes or self._waiting or (self._num_unshown and not is_urgent):
            return
        begun = next((s for s in self._splitters.values() if s.unfinished), None)
        text = begun.unfinished if begun else ""
        now = time.monotonic()
        if begun is None or text == self._refreshed:
            return
        before = self._refreshed_at if begun.is_bar else begun.fed_at
        if now - before < _REFRESH_PERIOD_S and not is_urgent:
            self.refresh_at = before + _REFRESH_PERIOD_S
            return
        self._refreshed, self._refreshed_at = text, now
        self._num_unshown += len(text)
        self.channel.post(Refresh(text=text))


# Escape sequences that move the cursor or erase: with several ranks they would overwrite lines of
# others. Colours are kept.
_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]|\x1b[78]")

# The live displays of rich, such as several progress bars, hide the cursor while they last. They
# are drawn again in place, after sequences that erase the line of the cursor and those above it.
_LINE_ABOVE = b"\x1b[1A\x1b[2K"
_LIVE = re.compile(rb"\x1b\[\?25([hl])|\r\x1b\[2K((?:\x1b\[1A\x1b\[2K)*)")
_CURSOR = re.compile(rb"\x1b\[\?25[hl]")

_MAX_LINE_BYTES = 1 << 16
_MAX_HISTORY_BYTES = 1 << 12


class LineSplitter:
    """Splits chunks of output into lines.

    A progress bar rewrites its line after carriage returns: only the last state of a finished line
    is kept, and `unfinished` is the state of the line that is being written. Lines of a live
    display are complete once it is not drawn again. `num_fed` is the number of chunks so far,
    and `fed_at` when the last one came.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._is_live = False
        self._num_redrawn = 0  # lines above that of the cursor in the live display
        self.num_fed, self.fed_at = 0, 0.0

    def feed(self, chunk: bytes) -> list[str]:
        """Add a chunk; return the lines that it completes, without line ends."""
        self.num_fed, self.fed_at = self.num_fed + 1, time.monotonic()
        data, whole, start, is_cut = self._rest + chunk, list[bytes](), 0, False
        for found in _LIVE.finditer(data):
            if found[1]:
                self._is_live = found[1] == b"l"
                self._num_redrawn *= self._is_live
            elif self._is_live:
                is_cut = _LINE_ABOVE.startswith(data[found.end() :])
                if is_cut:  # more lines above may follow
                    break
                num_above = found[2].count(b"A")
                whole += data[start : found.start()].split(b"\n")[: -1 - num_above]
                self._num_redrawn = max(self._num_redrawn, num_above)
                start = found.end()
        # As many lines as were drawn again so far may be drawn again: there are no more of them,
        # and other programs hide the cursor, too.
        *lines, begun = data[start:].split(b"\n")
        num_done = 0 if is_cut else max(0, len(lines) - self._num_redrawn)
        whole += lines[:num_done]
        self._rest = b"\n".join([*lines[num_done:], begun])
        if len(self._rest) > _MAX_HISTORY_BYTES:
            last = self._rest.rstrip(b"\r").rfind(b"\r")
            self._rest = self._rest[max(0, last) :]
        if len(self._rest) > _MAX_LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        return [_last_state(line) for line in whole]

    @property
    def unfinished(self) -> str:
        """Current state of the unfinished line; may be empty."""
        return _last_state(self._rest.rpartition(b"\n")[2])

    @property
    def is_bar(self) -> bool:
        """Whether the unfinished line is written again and again."""
        return b"\r" in self._rest or self._is_live

    def finish(self) -> list[str]:
        """Return the unfinished line, if any, at the end of the stream."""
        rest, self._rest = _CURSOR.sub(b"", self._rest), b""
        return [_last_state(line) for line in rest.split(b"\n")] if rest else []


def _last_state(line: bytes) -> str:
    states = line.decode("utf-8", "replace").split("\r")
    return _MOVES.sub("", next((state for state in reversed(states) if state), ""))
