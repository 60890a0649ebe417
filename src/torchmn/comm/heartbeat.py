"""Work whose duration differs between ranks and may exceed the time limit of a collective.

A rank with an empty shard finishes at once, a rank with a large shard after minutes. Working ranks
therefore send a heartbeat four times per time limit, and all ranks learn when one fails.
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
"""Errors that `run_on_one_rank` raises with their own class; any other becomes a DataError."""


class HeartbeatGather:
    """Waits for work that takes ranks different times. Every rank makes one for the same work.

    ``what`` names the work in messages. Each rank calls `heartbeat` repeatedly during the work, as
    often as it likes, and then either `finish` or `fail` once.

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
        """Report that this rank is still working, if a quarter of the time limit has passed.

        Raises CommunicationError: another rank failed.
        """
        if time.monotonic() - self._last_s > self._comm.timeout_s / 4:
            self._round(_WORKING, None)

    def finish(self, value: object) -> list[Any]:
        """Wait until all ranks have finished; returns the ``value`` of each rank, in rank order.

        Raises CommunicationError: another rank failed; the message names it and its error.
        """
        while True:
            states = self._round(_DONE, value)
            if all(state == _DONE for state, _ in states):
                return [theirs for _, theirs in states]

    def fail(self, error: Exception) -> None:
        """Report an error of this rank to the other ranks. The caller then raises it.

        A CommunicationError is not reported: the other ranks raise their own.
        """
        if isinstance(error, CommunicationError):
            return
        with suppress(CommunicationError):  # what the caller raises matters more
            self._comm.allgather_obj((_FAILED, f"{type(error).__name__}: {error}"))

    def _round(self, state: str, value: object) -> list[tuple[str, Any]]:
        # A round completes only if all ranks take part in it: ranks that have finished repeat their
        # state until the last one has.
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
    """Context for work that fails on all ranks if it fails on one. *Collective.*

    Call `HeartbeatGather.finish` at the end of the work.
    """
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

    ``work`` may take longer than the communicator's time limit if it calls ``heartbeat()`` several
    times per limit. The result is sent as an object.

    Raises:
        DataError, UnsupportedError, UsageError: ``work`` raised; the same message on all ranks.
    """
    gather = HeartbeatGather(comm, f"work of rank {rank}")
    outcome: tuple[str, Any] | None = None
    cause: Exception | None = None
    if comm.rank == rank:
        try:
            outcome = ("", work(gather.heartbeat))
        except CommunicationError:
            # From a heartbeat: another rank has failed, and none waits for the result any more.
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
    """Raise an error on all ranks if any rank passes one. *Collective*.

    Raises DataError: on all ranks, with the error of the first rank that has one.
    """
    text = None if error is None else f"Rank {comm.rank} on {comm.host}: {error}"
    failed = [theirs for theirs in comm.allgather_obj(text) if theirs is not None]
    if failed:
        raise DataError(failed[0]) from error
