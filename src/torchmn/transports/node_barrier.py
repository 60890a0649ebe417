"""Counters in shared memory by which the ranks of a node wait for each other.

A rank writes only its own counters, each on a cache line of its own, and reads the others'.
"""

from __future__ import annotations

import threading
from functools import partial

from torchmn.errors import TimeLimitError
from torchmn.transports.base import TimeLimit, poll_until

ARRIVED, FOLDED, NUM_COUNTERS = 0, 1, 2
LINE_BYTES = 128

_POLLS_BEFORE_YIELD = 300
_fence_lock = threading.Lock()


def counters_nbytes(num_ranks: int) -> int:
    """Bytes that the counters of so many ranks take."""
    return LINE_BYTES * NUM_COUNTERS * num_ranks


class NodeCounters:
    """How far every rank has come. ``cells`` is shared memory of `counters_nbytes`, as int64."""

    def __init__(self, cells: memoryview, rank: int, size: int) -> None:
        self._cells = cells
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]

    def count(self, counter: int, value: int) -> None:
        """Tell the others that this rank has come so far; what it wrote before is visible then."""
        _fence()
        self._cells[_index(self._rank, counter)] = value

    def wait(self, counter: int, value: int, limit: TimeLimit) -> None:
        """Wait until all ranks have come so far. Raises TimeLimitError, naming who has not."""
        for peer in self._peers:
            has_come = partial(self._has_come, _index(peer, counter), value)
            if not poll_until(has_come, limit, _POLLS_BEFORE_YIELD):
                raise TimeLimitError(
                    f"rank {peer} of this node did not come within {limit.seconds:g} s."
                )
        _fence()

    def _has_come(self, index: int, value: int) -> bool:
        return self._cells[index] >= value

    def close(self) -> None:
        """Let go of the memory."""
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
