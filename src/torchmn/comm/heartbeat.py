"""Work that takes ranks different times, and longer than the time limit of a collective.

A rank with an empty shard is done at once, one with a large shard after minutes. So ranks at work
send a heartbeat four times per time limit, and all ranks learn at once when one fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torchmn.base.errors import (
    CommunicationError,
    DataError,
    TorchmnError,
    UnsupportedError,
    UsageError,
)

if TYPE_CHECKING:
    from torchmn.comm import Communicator

Result = TypeVar("Result")

_WORKING, _DONE, _FAILED = "working", "done", "failed"
_ERRORS: dict[str, type[TorchmnError]] = {
    error.__name__: error for error in (DataError, UnsupportedError, UsageError)
}
"""What `run_on_one_rank` raises as it is; anything else becomes a DataError."""


class HeartbeatGather:
    """The end of a piece of work that every rank does. All ranks make one for the same work.

    ``what`` names the work in messages. Every rank calls `heartbeat` as often as it likes between
    two steps of the work, then either `finish` or `fail` once.

    >>> from torchmn.train.evaluation import HeartbeatGather
    >>> gather, num_words = HeartbeatGather(comm, "counting words"), 0
    >>> for line in ("a b", "c"):
    ...     num_words += len(line.split())
    ...     gather.heartbeat()
    >>> gather.finish(num_words)  # of all ranks
    [3]
    """

    def __init__(self, comm: Communicator, what: str) -> None:
        self._comm = comm
        self._what = what
        self._last_s = time.monotonic()

    def heartbeat(self) -> None:
        """Report that this rank is at work, if it is time to.

        Raises CommunicationError: another rank failed.
        """
        if time.monotonic() - self._last_s > self._comm.timeout_s / 4:
            self._round(_WORKING, None)

    def finish(self, value: object) -> list[Any]:
        """Contribute a value, wait until all ranks are done, and return their values in rank order.

        Raises CommunicationError: another rank failed; the message names it and its error.
        """
        while True:
            states = self._round(_DONE, value)
            if all(state == _DONE for state, _ in states):
                return [theirs for _, theirs in states]

    def fail(self, error: Exception) -> None:
        """Send an error of this rank, which the caller then raises, to the other ranks.

        Errors of communication are not sent: the other ranks have their own.
        """
        if isinstance(error, CommunicationError):
            return
        with suppress(CommunicationError):  # what the caller raises matters more
            self._comm.allgather_obj((_FAILED, f"{type(error).__name__}: {error}"))

    def _round(self, state: str, value: object) -> list[tuple[str, Any]]:
        states = self._comm.allgather_obj((state, value))
        self._last_s = time.monotonic()
        for rank, (theirs, text) in enumerate(states):
            if theirs == _FAILED:
                raise CommunicationError(
                    f"{self._comm.rank_label}: {self._what} stopped, because rank {rank} raised "
                    f"{text}"
                )
        return states


@contextmanager
def work_of_all_ranks(comm: Communicator, what: str) -> Iterator[HeartbeatGather]:
    """Work that ends on all ranks if it fails on one; call `HeartbeatGather.finish` after it."""
    gather = HeartbeatGather(comm, what)
    try:
        yield gather
    except Exception as error:
        gather.fail(error)
        raise


def run_on_one_rank(
    comm: Communicator, rank: int, work: Callable[[Callable[[], None]], Result]
) -> Result:
    """Run ``work(heartbeat)`` on one rank and return its result on all ranks. *Collective*.

    ``work`` calls ``heartbeat()`` several times per time limit of the communicator; then it may
    take longer than the limit. The result is sent as an object.

    Raises:
        DataError, UnsupportedError, UsageError: the work raised; the same message on all ranks.
    """
    gather = HeartbeatGather(comm, f"work of rank {rank}")
    outcome: tuple[str, Any] | None = None
    cause: Exception | None = None
    if comm.rank == rank:
        try:
            outcome = ("", work(gather.heartbeat))
        except CommunicationError:
            raise
        except Exception as error:
            cause = error
            kind = type(error).__name__
            text = str(error) if isinstance(error, TorchmnError) else f"{kind}: {error}"
            kind = kind if kind in _ERRORS else DataError.__name__
            outcome = (kind, f"Rank {comm.rank} on {comm.host}: {text}")
    kind, value = gather.finish(outcome)[rank]
    if kind:
        raise _ERRORS[kind](value) from cause
    return cast(Result, value)


def raise_if_any_failed(comm: Communicator, error: Exception | None) -> None:
    """Raise the first error that any rank has on all ranks. *Collective*.

    Raises DataError: the message names the first rank that failed, the same on all ranks.
    """
    text = None if error is None else f"Rank {comm.rank} on {comm.host}: {error}"
    failed = [theirs for theirs in comm.allgather_obj(text) if theirs is not None]
    if failed:
        raise DataError(failed[0]) from error
