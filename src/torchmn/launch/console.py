"""Show the lines of all ranks on one terminal or in one file."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO

from torchmn.control.messages import Stream


class RankOutput:
    """Writes whole lines, each with its rank in front; standard output and error stay apart.

    On a terminal the progress bar that moved last is shown below the lines. Raises
    BrokenPipeError from every method: nobody reads any more.
    """

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._files: dict[Stream, TextIO] = {"out": out, "err": err}
        self._shows_bar = False
        self._is_closed = False

    @property
    def shows_bars(self) -> bool:
        """Whether `refresh` shows anything."""
        return self._files["err"].isatty()

    def lines(self, rank: int, stream: Stream, lines: list[str]) -> None:
        """Lines of one rank."""
        self._write(stream, "".join(f"[{rank}] {line}\n" for line in lines))

    def say(self, text: str) -> None:
        """A sentence of our own."""
        self._write("err", f"torchmn: {text}\n")

    def quote(self, text: str) -> None:
        """Somebody else's words as they are, on standard error."""
        self._write("err", text if text.endswith("\n") else f"{text}\n")

    def refresh(self, rank: int, text: str) -> None:
        """What the progress bar of a rank shows now."""
        if self.shows_bars:
            self._write("err", f"[{rank}] {text}")
            self._shows_bar = True

    def close(self) -> None:
        """Show nothing any more. Python must not stumble over the broken pipe at its exit."""
        self._is_closed = True
        void = os.open(os.devnull, os.O_WRONLY)
        for file in self._files.values():
            with suppress(OSError, ValueError):
                file.flush()
        for file in self._files.values():
            with suppress(OSError, ValueError):
                os.dup2(void, file.fileno())
        os.close(void)

    def _write(self, stream: Stream, text: str) -> None:
        if self._is_closed:
            return
        if self._shows_bar:
            self._files["err"].write("\r\x1b[K")
            self._files["err"].flush()
            self._shows_bar = False
        file = self._files[stream]
        encoding = file.encoding or "utf-8"
        file.write(text.encode(encoding, "replace").decode(encoding))
        file.flush()
