"""The exceptions that torchmn raises, and the categories of its warnings, as class hierarchies.

TorchmnError
├── UsageError (ValueError)            an argument has an invalid value
│   └── UnknownNameError               a name that is not in a registry; lists the known ones
├── UnsupportedError                   valid arguments in an unsupported combination
├── TopologyError                      sources of ranks, nodes or devices contradict each other
├── LaunchError                        a job could not be started or did not start as asked
├── RankError                          a rank that `launch_local` started failed
├── NonFiniteGradientError             a gradient holds NaN or infinity
├── DataError                          a data file is missing, damaged or of another format
└── CommunicationError                 a collective did not complete
    ├── TimeLimitError                 it did not complete within its time limit
    ├── PeerLostError                  a peer closed its connection or died
    └── RankMismatchError              ranks called a collective with different arguments

TorchmnWarning (UserWarning)
├── ResultWarning                      results may not be those of one process
├── PerformanceWarning                 results are right, and slower than they could be
└── CheckpointWarning                  what was or will be saved cannot be used as it was meant

A message contains the value seen, the rule that it violates and what to do about it. Errors of a
communicator also name the rank and host that raised them.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Collection, Iterable
from types import ModuleType

__all__ = [
    "CheckpointWarning",
    "CommunicationError",
    "DataError",
    "LaunchError",
    "NonFiniteGradientError",
    "PeerLostError",
    "PerformanceWarning",
    "RankError",
    "RankMismatchError",
    "ResultWarning",
    "TimeLimitError",
    "TopologyError",
    "TorchmnError",
    "TorchmnWarning",
    "UnknownNameError",
    "UnsupportedError",
    "UsageError",
    "require",
]


class TorchmnError(Exception):
    """Base class of all exceptions that torchmn raises on purpose.

    Example:
        >>> try:
        ...     torchmn.create_communicator("no such route")
        ... except torchmn.TorchmnError as error:
        ...     print(type(error).__name__)
        UnknownNameError
    """


class UsageError(TorchmnError, ValueError):
    """An argument has an invalid value."""


class UnknownNameError(UsageError):
    """A name that is not in a registry."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        super().__init__(f"Unknown {kind} {name!r}. Known: {', '.join(known)}.")


class UnsupportedError(TorchmnError):
    """Valid arguments in a combination that is not supported."""


class TopologyError(TorchmnError):
    """Two sources of information about ranks, nodes or devices contradict each other."""


class LaunchError(TorchmnError):
    """A job could not be started, or did not start as asked."""


class RankError(TorchmnError):
    """A rank that `torchmn.launch_local` started raised an exception, or was ended.

    ``rank`` is the rank that failed first, or ``None`` if only the message names it. The rank's
    exception is the ``__cause__`` if it could be sent to the caller.
    """

    def __init__(self, text: str, *, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class NonFiniteGradientError(TorchmnError):
    """A gradient contains NaN or infinity on at least one rank. All ranks raise this error."""


class DataError(TorchmnError):
    """A data file is missing, damaged or of another format."""


class CommunicationError(TorchmnError):
    """A collective did not complete."""


class TimeLimitError(CommunicationError):
    """A collective did not complete within its time limit."""


class PeerLostError(CommunicationError):
    """A peer closed its connection or died."""


class RankMismatchError(CommunicationError):
    """Ranks called the same collective with different arguments, or different collectives."""


class TorchmnWarning(UserWarning):
    """Base class of all warnings of torchmn: training continues, and the script should change.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", torchmn.errors.ResultWarning)
        ...     warnings.simplefilter("ignore", torchmn.errors.PerformanceWarning)
    """


class ResultWarning(TorchmnWarning):
    """What is trained may differ from what one process would train, or is not finite."""


class PerformanceWarning(TorchmnWarning):
    """Results are right, but something is slower than it could be, or has no effect."""


class CheckpointWarning(TorchmnWarning):
    """Something cannot be saved, or a saved state cannot be used as it was meant."""


def raise_if_unknown(kind: str, name: object, known: Collection[str]) -> None:
    """Raise UnknownNameError if ``name`` is not one of the ``known`` names."""
    if name not in known:
        raise UnknownNameError(kind, name, known)


def raise_if_no_count(name: str, value: object, what: str, *, least: int = 1) -> None:
    """Raise UsageError unless an argument is an int of at least ``least``.

    ``what`` describes the argument in the message, such as "a number of samples".
    """
    # Not isinstance(): True and False are ints, too.
    if type(value) is not int or value < least:
        raise UsageError(f"{name}={value!r} must be {what}, at least {least}.")


def require(module: str, purpose: str, package: str) -> ModuleType:
    """Import and return an optional dependency.

    Args:
        module: the name of the module.
        purpose: the feature that needs it; the message begins with this text.
        package: the requirement to install with pip, such as ``torchmn[images]``.

    Raises UnsupportedError: the module cannot be imported.
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
    """The exit status as a shell reports it: 128 + N for a process that was ended by signal N."""
    return 128 - returncode if returncode < 0 else returncode


for _name in __all__:
    # Tracebacks and pickles name the module from which users import them.
    globals()[_name].__module__ = "torchmn.errors"
