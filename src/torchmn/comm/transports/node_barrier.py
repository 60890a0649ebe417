"""Counters in shared memory, by which the ranks of a node wait for each other.

A rank writes only its own counters, each in a cache line of its own, and reads those of the others.
"""

from __future__ import annotations

import threading
from functools import partial

from torchmn.comm.transports.base import TimeLimit, poll_until
from torchmn.errors import TimeLimitError

ARRIVED, FOLDED, NUM_COUNTERS = 0, 1, 2
LINE_BYTES = 128

_POLLS_BEFORE_YIELD = 300
_fence_lock = threading.Lock()


def counters_nbytes(num_ranks: int) -> int:
    """Bytes of the counters of ``num_ranks`` ranks."""
    return LINE_BYTES * NUM_COUNTERS * num_ranks


class NodeCounters:
    """The progress of every rank. ``cells`` is shared memory of `counters_nbytes`, as int64."""

    def __init__(self, cells: memoryview, rank: int, size: int) -> None:
        self._cells = cells
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]

    def count(self, counter: int, value: int) -> None:
        """Set a counter of this rank; what the rank wrote before is visible to the others then."""
        _fence()
        self._cells[_index(self._rank, counter)] = value

    def wait(self, counter: int, value: int, limit: TimeLimit) -> None:
        """Wait until all ranks have counted to ``value``. Raises TimeLimitError."""
        for peer in self._peers:
            has_arrived = partial(self._has_arrived, _index(peer, counter), value)
            if not poll_until(has_arrived, limit, _POLLS_BEFORE_YIELD):
                raise TimeLimitError(
                    f"rank {peer} of this node did not arrive within {limit.seconds:g} s."
                )
        _fence()

    def _has_arrived(self, index: int, value: int) -> bool:
        return self._cells[index] >= value

    def close(self) -> None:
        """Release the memory."""
        self._cells.release()


def _index(rank: int, counter: int) -> int:
    return (rank * NUM_COUNTERS + counter) * LINE_BYTES // 8


def _fence() -> None:
    """Order memory accesses before and after, on processors that reorder stores (ARM).

    Two rounds of acquire and release: what is written before the first release is visible before
    anything after the second acquire. On x86 stores are ordered anyway.
    """
    with _fence_lock:
        pass
    with _fence_lock:
        pass
