"""The watcher: a thread that observes queued work until the device has completed it.

No thread waits for a queued collective, so none would notice that it never ends. The watcher polls
the oldest pending one, raises an error when its time limit has passed, and keeps the memory of jobs
alive until the device no longer uses it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from torchmn.comm.streams import Event, Streams

_PERIOD_S = 0.01  # each poll takes the interpreter from the thread that launches kernels


class Queued(Protocol):
    """Work queued on the exchange's stream, behind all work that is watched already."""

    def begin(self) -> None:
        """Start the time limit. Called when all work before it has completed."""

    def is_over(self) -> bool:
        """Whether the device has completed it. Raises its error if it has failed."""

    def drop(self) -> None:
        """Give up: work before it has failed, and `is_over` is not called again."""


class Held:
    """Keeps objects, and the memory of their tensors, alive until an event has completed.

    The caching allocator reuses freed memory on the stream that allocated it, and that stream could
    overwrite it while the stream of the exchange still reads it.
    """

    def __init__(self, event: Event, *objects: object) -> None:
        self._event = event
        self._objects = objects

    def begin(self) -> None:
        return

    def is_over(self) -> bool:
        return self._event.query()

    def drop(self) -> None:
        return


class Watcher:
    """Observes queued work in order. Local. ``on_failure`` is called on the watcher's thread."""

    def __init__(self, streams: Streams, on_failure: Callable[[BaseException], None]) -> None:
        self._streams = streams
        self._on_failure = on_failure
        self._condition = threading.Condition()
        self._queue: deque[Queued] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def watch(self, item: Queued) -> None:
        """Watch ``item`` after all items of earlier calls."""
        with self._condition:
            self._queue.append(item)
            if self._thread is None:
                # A daemon, because the work that it watches may never end.
                self._thread = threading.Thread(
                    target=self._loop, name="torchmn-watcher", daemon=True
                )
                self._thread.start()
            self._condition.notify()

    @property
    def num_held(self) -> int:
        """Number of items that the device has not completed. From any thread."""
        return len(self._queue)

    def close(self) -> None:
        """Block until all watched work has completed or failed, then end the thread."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        self._streams.enter_thread()
        # Work.wait() of NCCL makes the current stream wait. A new thread begins with the default
        # stream, which must not be used while a script captures a CUDA graph.
        with self._streams.exchanging():
            while self._await_item():
                try:
                    self._look_at_first()
                except Exception as error:
                    # Before the rest is dropped, so that no later call returns its results.
                    self._on_failure(error)
                    self._drop_all()

    def _await_item(self) -> bool:
        with self._condition:
            while not self._queue:
                if self._is_closed:
                    return False
                self._condition.wait()
        return True

    def _look_at_first(self) -> None:
        """Block until the first item is over. A function, so that no variable keeps the item."""
        first = self._queue[0]  # without the lock: only this thread removes items
        first.begin()
        while not first.is_over():
            time.sleep(_PERIOD_S)
        self._queue.popleft()

    def _drop_all(self) -> None:
        # All of it is queued behind the work that has failed, and may never complete.
        self._queue.popleft()
        while self._queue:
            self._queue.popleft().drop()
