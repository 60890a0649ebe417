"""The loggers of torchmn: ``logging.getLogger("torchmn")``, with a child for each module.

No handler is installed and no level is set, so a script that configures `logging` finds nothing to
undo: each record arrives at its handlers once. Until it does so, what Python would drop is printed
to standard error by a logger that is no part of the hierarchy (`Log`).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:  # which has no parameters before Python 3.11
    _Adapter = logging.LoggerAdapter

LOG_VARIABLE = "TORCHMN_LOG"
LEVELS = ("debug", "info", "warning", "error")
_LIBRARY = "torchmn"


class Log(_Adapter):
    """Passes messages on to the logger ``name``, with rank, world_size and host in each record.

    If neither that logger nor one above it has a handler, messages are printed to standard error:
    from INFO on, unless a level was set below the root logger. Those of torchmn begin with
    ``torchmn:``. If ``is_silent``, nothing is passed on.
    """

    def __init__(
        self,
        name: str,
        *,
        rank: int | None = None,
        size: int | None = None,
        host: str = "",
        is_silent: bool = False,
    ) -> None:
        given = os.environ.get("RANK", "")
        if rank is None and given.isdecimal():  # of torchmn run, and of torchrun
            rank = int(given)
        place = {"rank": rank, "world_size": size, "host": host or socket.gethostname()}
        super().__init__(logging.getLogger(name), place)
        self._is_silent = is_silent
        # Made by its class, `getLogger` does not know it: it neither has nor gets a parent.
        self._unconfigured = logging.Logger(name, level=1)
        self._unconfigured.addHandler(_StandardError())

    def isEnabledFor(self, level: int) -> bool:
        """Whether messages of this level are passed on."""
        if self._is_silent:
            return False
        if self.logger.hasHandlers() or _has_level(self.logger):
            return self.logger.isEnabledFor(level)
        return level >= logging.INFO and self._unconfigured.isEnabledFor(level)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the place to the ``extra`` of a message."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message; `info`, `warning` and so on call this."""
        if self.isEnabledFor(level):
            msg, passed = self.process(msg, kwargs)
            # This function is not the place that a formatter wants to name.
            passed["stacklevel"] = passed.get("stacklevel", 1) + 1
            target = self.logger if self.logger.hasHandlers() else self._unconfigured
            target.log(level, msg, *args, **passed)


class _StandardError(logging.Handler):
    """Prints to what `sys.stderr` is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        is_ours = record.name.partition(".")[0] == _LIBRARY
        lines = self.format(record).split("\n")
        text = "".join(f"{'torchmn: ' * is_ours}{line}\n" for line in lines)
        if sys.stderr is not None:  # None if the descriptor was closed when Python started
            with suppress(OSError, ValueError):
                print(text, end="", file=sys.stderr, flush=True)


def _has_level(logger: logging.Logger) -> bool:
    """Whether a level was set for a logger or for one between it and the root logger."""
    current: logging.Logger | None = logger
    while current is not None and current.parent is not None:
        if current.level:
            return True
        current = current.parent
    return False


def use_level(text: str) -> None:
    """Set the level of torchmn's loggers, as the environment variable does; one of `LEVELS`."""
    if text.lower() in LEVELS:
        logging.getLogger(_LIBRARY).setLevel(text.upper())
    elif text:
        Log(__name__).warning(
            "%s=%s is not used: it must be %s.", LOG_VARIABLE, text, " or ".join(LEVELS)
        )


use_level(os.environ.get(LOG_VARIABLE, ""))
