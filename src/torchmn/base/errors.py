"""Every error torchmn raises, as one tree.

TorchmnError
├── UsageError (ValueError)            an argument has a value that the rule forbids
│   └── UnknownNameError               a name that is not in a registry; lists the known ones
├── UnsupportedError                   each part is fine, the combination is refused
├── TopologyError                      two sources of facts about the world contradict each other
├── LaunchError                        a job could not be started or did not start as asked
├── RankError                          a rank that `launch_local` started failed
├── SharedMemoryError                    the ranks of a node cannot share memory
├── NonFiniteGradientError             a gradient holds NaN or infinity
├── DataError                          a data file is missing, damaged or of another format
└── CommunicationError                 a collective did not complete
    ├── TimeLimitError                 it did not complete within its time limit
    ├── PeerLostError                  a peer closed its connection or died
    └── RankMismatchError              ranks came to the same collective with different intentions

A message holds what was seen, what the rule is and what to do. On a communicator it also says
which rank on which host speaks.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Collection, Iterable
from types import ModuleType

__all__ = [
    "CommunicationError",
    "DataError",
    "LaunchError",
    "NonFiniteGradientError",
    "PeerLostError",
    "RankError",
    "RankMismatchError",
    "SharedMemoryError",
    "TimeLimitError",
    "TopologyError",
    "TorchmnError",
    "UnknownNameError",
    "UnsupportedError",
    "UsageError",
    "require",
]


class TorchmnError(Exception):
    """The root of the tree: catch this to catch everything torchmn raises on purpose.

    Example:
        >>> try:
        ...     torchmn.create_communicator("no such route")
        ... except torchmn.TorchmnError as error:
        ...     print(type(error).__name__)
        UnknownNameError
    """


class UsageError(TorchmnError, ValueError):
    """An argument has a value that the rule forbids."""


class UnknownNameError(UsageError):
    """A name that is not in a registry."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        super().__init__(f"Unknown {kind} {name!r}. Known: {', '.join(known)}.")


class UnsupportedError(TorchmnError):
    """Each part is fine by itself, the combination is refused."""


class TopologyError(TorchmnError):
    """Two sources of facts about ranks, nodes or devices contradict each other."""


class LaunchError(TorchmnError):
    """A job could not be started, or did not start as asked."""


class RankError(TorchmnError):
    """A rank that `torchmn.launch_local` started raised an exception, or was ended.

    ``rank`` is the one that failed first, ``None`` where the message alone names it. Its exception
    is the ``__cause__`` where it could be sent to the caller.
    """

    def __init__(self, text: str, *, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class SharedMemoryError(TorchmnError):
    """The ranks of a node cannot share memory, or there is too little of it."""


class NonFiniteGradientError(TorchmnError):
    """A gradient holds NaN or infinity, on some rank: all ranks raise it."""


class DataError(TorchmnError):
    """A data file is missing, damaged or of another format."""


class CommunicationError(TorchmnError):
    """A collective did not complete."""


class TimeLimitError(CommunicationError):
    """A collective did not complete within its time limit."""


class PeerLostError(CommunicationError):
    """A peer closed its connection or died."""


class RankMismatchError(CommunicationError):
    """Ranks came to the same collective with different intentions."""


def raise_if_unknown(kind: str, name: object, known: Collection[str]) -> None:
    """Raise UnknownNameError if a name is none of these."""
    if name not in known:
        raise UnknownNameError(kind, name, known)


def raise_if_no_count(name: str, value: object, what: str, *, least: int = 1) -> None:
    """Raise UsageError if an argument is not ``what``, such as "a number of samples"."""
    if type(value) is not int or value < least:
        raise UsageError(f"{name}={value!r} must be {what}, at least {least}.")


def require(module: str, purpose: str, package: str) -> ModuleType:
    """Import what torchmn does not depend on.

    Args:
        module: its name.
        purpose: what needs it, the beginning of a sentence.
        package: what pip installs, such as ``torchmn[images]``.

    Raises UnsupportedError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"{purpose} needs {module}, which cannot be imported ({error}). Install it: "
            f"pip install {shlex.quote(package)}."
        ) from error


SAVED_STATUS = 85
"""The exit status of ranks that saved a checkpoint and exited before the job's time limit."""


def shell_code(returncode: int) -> int:
    """An exit code as a shell reports it: 128 + signal for a process that a signal ended."""
    return 128 - returncode if returncode < 0 else returncode


for _name in __all__:
    # Tracebacks and pickles name the module from which users import them.
    globals()[_name].__module__ = "torchmn.errors"
