"""Show the lines of all ranks on one terminal or in one file.

The job does not depend on a reader: a reader that pauses, a full disk or a closed stream can lose
output here, which is in the log folder as well.
"""

import os
import select
import shutil
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from torchmn.cluster.units import counted
from torchmn.control.messages import Stream

_MAX_WAITING_BYTES = 1 << 20
_NAMES: dict[Stream, str] = {"out": "standard output", "err": "standard error"}


def open_standard_streams() -> tuple[TextIO, TextIO]:
    """Return `sys.stdout` and `sys.stderr`; those that the caller has closed lead to /dev/null.

    Closed descriptors 0 to 2 are opened, or the next file or socket would get such a number.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is this one
    return sys.stdout or _stream_of(1), sys.stderr or _stream_of(2)


def _stream_of(descriptor: int) -> TextIO:
    return open(descriptor, "w", closefd=False)


class RankOutput:
    """Writes whole lines with a prefix of their rank; standard output and error stay separate.

    On a terminal the line that a rank has begun last, such as a progress bar, is shown below the
    lines, and while a rank awaits input its prompt. When the reader of the
    output has left (as ``| head`` does), `is_closed` becomes true and nothing more is written.

    After `start` a thread writes, so that a reader that pauses does not stop the caller, which asks
    `has_room` before it lets ranks send more.
    """

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._files: dict[Stream, TextIO] = {"out": out, "err": err}
        self._bar = ""  # what is shown below the lines
        # The rank that awaits input: only its line is shown, and again after other lines.
        self.prompting: int | None = None
        self._num_missing: dict[Stream, int] = {"out": 0, "err": 0}
        self._waiting: deque[tuple[Stream, str, bool]] = deque()
        self._num_waiting_bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self.is_closed = False
        self._said: set[str] = set()

    @property
    def shows_bars(self) -> bool:
        """Whether `refresh` shows anything."""
        return self._files["err"].isatty()

    def variables(self, num_ranks: int, env: Mapping[str, str]) -> dict[str, str]:
        """Return variables by which scripts write for the terminal that shows their output.

        Libraries such as tqdm and rich then use its width, beside the prefix of the rank, and
        colours unless ``env`` has NO_COLOR. Empty if the output goes elsewhere.
        """
        if not all(file.isatty() for file in self._files.values()):
            return {}
        width = shutil.get_terminal_size().columns - len(f"[{num_ranks - 1}] ")
        has_colors = "NO_COLOR" not in env and env.get("TERM") != "dumb"
        return {"COLUMNS": str(max(width, 1)), **({"FORCE_COLOR": "1"} if has_colors else {})}

    @property
    def has_room(self) -> bool:
        """Whether less than `_MAX_WAITING_BYTES` wait to be written."""
        return self._num_waiting_bytes < _MAX_WAITING_BYTES

    def start(self) -> None:
        """Write in a thread from now on."""
        # A daemon: a reader that never reads again must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="torchmn-output", daemon=True)
        self._thread.start()

    def finish(self, limit_s: float) -> bool:
        """Wait for the thread; return whether everything was written within ``limit_s``."""
        if self._thread is None:
            return True
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def lines(self, rank: int, stream: Stream, lines: list[str]) -> None:
        """Write lines of one rank."""
        self._write(stream, "".join(f"[{rank}] {line}\n" for line in lines))

    def say(self, text: str) -> None:
        """Write a message of torchmn itself."""
        self._write("err", f"torchmn: {text}\n")

    def say_once(self, text: str) -> None:
        """Write a message of torchmn itself, unless it was written so before."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def quote(self, text: str) -> None:
        """Write text unchanged to standard error."""
        self._write("err", text if text.endswith("\n") else f"{text}\n")

    def refresh(self, rank: int, text: str) -> None:
        """Show the line that a rank has begun, such as a progress bar, in its current state."""
        if self.shows_bars and self.prompting in (None, rank):
            self._write("err", f"[{rank}] {text}", is_bar=True)

    def _write(self, stream: Stream, text: str, *, is_bar: bool = False) -> None:
        if self.is_closed:  # read without the lock: the thread only ever sets it
            return
        if self._thread is None:
            self._put(stream, text, is_bar)
            return
        with self._changed:
            self._waiting.append((stream, text, is_bar))
            self._num_waiting_bytes += len(text)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._is_ending:
                        return
                    self._changed.wait()
                stream, text, is_bar = self._waiting.popleft()
            if not self.is_closed:
                self._put(stream, text, is_bar)
            # Only now: text that a reader holds up counts as waiting.
            with self._changed:
                self._num_waiting_bytes -= len(text)

    def _put(self, stream: Stream, text: str, is_bar: bool) -> None:
        """Write now. After an error count the lost lines, and report it on the other stream."""
        try:
            bar, self._bar = self._bar, ""
            if bar:
                _write_all(self._files["err"], "\r\x1b[K")
            if self._num_missing[stream]:
                num = counted(self._num_missing[stream], "line")
                missing = f"torchmn: {num} left out here\n"
                _write_all(self._files[stream], missing)
                self._num_missing[stream] = 0
            _write_all(self._files[stream], text)
            if is_bar:
                self._bar = text
            elif bar and self.prompting is not None:
                _write_all(self._files["err"], bar)
                self._bar = bar
        except BrokenPipeError:
            self.is_closed = True
        except OSError as error:
            is_new = not self._num_missing[stream]
            self._num_missing[stream] += max(1, text.count("\n"))
            other: Stream = "err" if stream == "out" else "out"
            if is_new and not self._num_missing[other]:
                self._put(other, _missing_text(stream, error), is_bar=False)


def _missing_text(stream: Stream, error: OSError) -> str:
    return (
        f"torchmn: {_NAMES[stream]} cannot be written ({error.strerror or error}). The job "
        "continues, and its log folder has the output of the ranks.\n"
    )


def _write_all(file: TextIO, text: str) -> None:
    """Write past the file object's buffer, which Python would fail to flush again at exit."""
    try:
        descriptor = file.fileno()
    except (OSError, ValueError):  # not a file of the system
        encoding = file.encoding or "utf-8"
        file.write(text.encode(encoding, "replace").decode(encoding))
        file.flush()
        return
    rest = memoryview(text.encode(file.encoding or "utf-8", "replace"))
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # who shares the terminal with us has asked for that
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
