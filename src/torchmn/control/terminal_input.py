"""The terminal of `torchmn run` as the standard input of one rank's script.

A rank that reads from a terminal waits for a person, for example in pdb. No time limit applies to
that: other ranks ask whether it does so (`awaits_input`), and the launcher is told, which shows the
prompt and passes Ctrl-C to this rank alone. All other ranks have an empty standard input.
"""

import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchmn.base.errors import UsageError
from torchmn.base.log import Log
from torchmn.cluster.environment_variables import INPUT_RANK_VARIABLE

PERSON_S = 7 * 86_400.0
"""A limit for waits that a person may prolong, where a library needs a number."""


class TerminalInput(io.TextIOWrapper):
    """Standard input from a terminal; ``report(begins)`` is called when a read begins and ends.

    Built-in `input`, `pdb` and `code` read through `sys.stdin`, which this replaces: since the
    standard output of a rank is a pipe, they call `readline` and do not use GNU readline.
    """

    def __init__(self, report: Callable[[bool], object]) -> None:
        # A second object for descriptor 0: `sys.__stdin__` stays what it is.
        super().__init__(
            open(0, "rb", closefd=False),  # noqa: SIM115 - as long as the process
            errors="surrogateescape",
        )
        self._report = report
        self.is_awaited = False

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        """Read a line, as the base class does."""
        with self._awaited():
            return super().readline(size)

    def read(self, size: int | None = -1, /) -> str:
        """Read up to ``size`` characters, as the base class does."""
        with self._awaited():
            return super().read(size)

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        self.is_awaited = True
        self._report(True)
        try:
            yield
        finally:  # also after Ctrl-C
            self.is_awaited = False
            self._report(False)


def has_terminal() -> bool:
    """Whether the standard input of this process is the terminal of `torchmn run`."""
    return isinstance(sys.stdin, TerminalInput)


def awaits_input() -> bool:
    """Whether this process waits for a person at the terminal. From any thread."""
    return isinstance(sys.stdin, TerminalInput) and sys.stdin.is_awaited


def skip_breakpoint(*_: object, **__: object) -> None:
    """Take the place of `breakpoint` on ranks without the terminal: continue, and say so once."""
    if not _skipped.is_set():
        _skipped.set()
        Log(__name__).info(
            "rank %s continues at breakpoint(): the terminal belongs to rank %s (%s chooses it)",
            os.environ.get("RANK", ""),
            os.environ.get(INPUT_RANK_VARIABLE, ""),
            INPUT_RANK_VARIABLE,
        )


_skipped = threading.Event()


def explained(error: BaseException) -> BaseException:
    """Return the error, or where a debugger ended for lack of a terminal one that says so."""
    # Not imported here: without the module there is no such exception.
    quits = getattr(sys.modules.get("bdb"), "BdbQuit", None)
    if quits is None or type(error) is not quits:
        return error
    if error.args:  # raised again by a DataLoader, with the traceback of its worker
        text = (
            "A debugger was started in a worker process of a DataLoader, which has no terminal. "
            "Use num_workers=0 while you debug."
        )
    elif has_terminal():  # the person quit
        return error
    else:
        text = (
            "A debugger was started, and the standard input of this rank is no terminal. Start the "
            "job with `torchmn run` in the foreground of a terminal: rank 0, or the one that "
            f"{INPUT_RANK_VARIABLE} names, gets it if it runs on that host. breakpoint() stops "
            "there and continues on all other ranks, pdb.set_trace() is for that rank alone."
        )
    return UsageError(text).with_traceback(error.__traceback__)
