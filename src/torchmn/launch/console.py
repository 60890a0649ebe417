"""Show the lines of all ranks on one terminal or in one file."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO

from torchmn.control.messages.job import Stream


class RankOutput:
    """Writes whole lines with a prefix of their rank; standard output and error stay separate.

    On a terminal the progress bar that moved last is shown below the lines. When the reader of the
    output has left (as ``| head`` does), `is_closed` becomes true and nothing more is written.
    """

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._files: dict[Stream, TextIO] = {"out": out, "err": err}
        self._shows_bar = False
        self.is_closed = False

    @property
    def shows_bars(self) -> bool:
        """Whether `refresh` shows anything."""
        return self._files["err"].isatty()

    def lines(self, rank: int, stream: Stream, lines: list[str]) -> None:
        """Write lines of one rank."""
        self._write(stream, "".join(f"[{rank}] {line}\n" for line in lines))

    def say(self, text: str) -> None:
        """Write a message of torchmn itself."""
        self._write("err", f"torchmn: {text}\n")

    def quote(self, text: str) -> None:
        """Write text unchanged to standard error."""
        self._write("err", text if text.endswith("\n") else f"{text}\n")

    def refresh(self, rank: int, text: str) -> None:
        """Show the current state of a rank's progress bar."""
        if self.shows_bars:
            self._write("err", f"[{rank}] {text}")
            self._shows_bar = True

    def _write(self, stream: Stream, text: str) -> None:
        if self.is_closed:
            return
        try:
            if self._shows_bar:
                self._files["err"].write("\r\x1b[K")
                self._files["err"].flush()
                self._shows_bar = False
            file = self._files[stream]
            encoding = file.encoding or "utf-8"
            file.write(text.encode(encoding, "replace").decode(encoding))
            file.flush()
        except BrokenPipeError:
            self._close()

    def _close(self) -> None:
        """Discard what is left, so that Python does not fail on the broken pipe when it exits."""
        self.is_closed = True
        void = os.open(os.devnull, os.O_WRONLY)
        for file in self._files.values():
            with suppress(OSError, ValueError):
                file.flush()
        for file in self._files.values():
            with suppress(OSError, ValueError):
                os.dup2(void, file.fileno())
        os.close(void)
