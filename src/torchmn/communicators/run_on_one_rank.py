"""One rank does something long while the others wait, and all hear how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from torchmn.errors import (
    CommunicationError,
    DataError,
    TorchmnError,
    UnsupportedError,
    UsageError,
)

if TYPE_CHECKING:
    from torchmn.communicators import Communicator

Result = TypeVar("Result")

# What the others raise is named by the worker; anything that is not here is a DataError.
_KINDS: dict[str, type[TorchmnError]] = {
    kind.__name__: kind for kind in (DataError, UnsupportedError, UsageError)
}


def run_on_one_rank(
    comm: Communicator, worker: int, work: Callable[[Callable[[], None]], Result]
) -> Result:
    """Run ``work(heartbeat)`` on rank ``worker`` and give its result to all ranks. *Collective*.

    ``work`` calls ``heartbeat()`` every now and then: several times per time limit of the
    communicator it lets the others know, so the work as a whole may take longer than the limit.
    The result travels as an object.

    Raises:
        DataError, UnsupportedError, UsageError: the work raised; the same sentence on all ranks.
    """
    if comm.rank != worker:
        return _wait(comm, worker)
    beat = _Beat(comm, worker)
    try:
        result = work(beat)
    except CommunicationError:
        raise
    except Exception as error:
        kind = type(error).__name__ if type(error).__name__ in _KINDS else DataError.__name__
        seen = str(error) if isinstance(error, TorchmnError) else f"{type(error).__name__}: {error}"
        sentence = f"Rank {comm.rank} on {comm.host}: {seen}"
        comm.bcast_obj(("failed", kind, sentence), root=worker)
        raise _KINDS[kind](sentence) from error
    comm.bcast_obj(("done", result, ""), root=worker)
    return result


def raise_if_any_failed(comm: Communicator, error: Exception | None) -> None:
    """Let all ranks raise the first error that any of them has. *Collective*.

    Raises DataError: the sentence names the first rank that failed, the same on all ranks.
    """
    sentence = None if error is None else f"Rank {comm.rank} on {comm.host}: {error}"
    failed = [theirs for theirs in comm.allgather_obj(sentence) if theirs is not None]
    if failed:
        raise DataError(failed[0]) from error


class _Beat:
    def __init__(self, comm: Communicator, worker: int) -> None:
        self._comm = comm
        self._worker = worker
        self._last_s = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last_s > self._comm.timeout_s / 4:
            self._comm.bcast_obj(("working", None, ""), root=self._worker)
            self._last_s = time.monotonic()


def _wait(comm: Communicator, worker: int) -> Result:  # type: ignore[type-var]
    while True:
        state, value, sentence = comm.bcast_obj(None, root=worker)
        if state == "done":
            return value  # type: ignore[no-any-return]
        if state == "failed":
            raise _KINDS[value](sentence)
