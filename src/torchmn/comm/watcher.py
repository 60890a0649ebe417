"""The watcher: one thread that looks at what is queued on a device until the device has done it.

Nobody waits for a queued collective, so nobody would notice that it does not end. The watcher asks
the first one that is not over whether it is, fails it when its time limit has passed, and keeps the
memory of jobs until the device no longer uses it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from torchmn.comm.streams import Event, Streams

_PERIOD_S = 0.01  # each look takes the interpreter from the thread that launches kernels


class Queued(Protocol):
    """Something queued on the stream of the exchange, behind everything that is watched already."""

    def begin(self) -> None:
        """Called when all before it is over: its time limit counts from now."""

    def is_over(self) -> bool:
        """Whether the device has done it. Raises the error with which it has failed."""

    def drop(self) -> None:
        """Called in place of any further question when one before it has failed."""


class Held:
    """Keeps objects, and the memory of their tensors, until a stream has passed an event.

    Memory that is freed earlier goes back to the stream that it is from, which may write into it
    while the stream of the exchange still reads it.
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
    """Looks at queued work in its order. Local. ``on_failure`` is called on its thread."""

    def __init__(self, streams: Streams, on_failure: Callable[[BaseException], None]) -> None:
        self._streams = streams
        self._on_failure = on_failure
        self._condition = threading.Condition()
        self._queue: deque[Queued] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def watch(self, item: Queued) -> None:
        """Look at this as well. Its order is that of the calls."""
        with self._condition:
            self._queue.append(item)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, name="torchmn-watcher", daemon=True
                )
                self._thread.start()
            self._condition.notify()

    def close(self) -> None:
        """Return when all that is watched is over, or has failed."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        self._streams.enter_thread()
        # Looking at work of NCCL lets the current stream wait for it, and the stream that every
        # thread begins with must not be touched while a script records a CUDA graph.
        with self._streams.exchanging():
            while self._await_item():
                try:
                    self._look_at_first()
                except Exception as error:
                    # First, so that no later call believes in what is queued.
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
        """Return when the first item is over. A function: no variable keeps the item after it."""
        first = self._queue[0]
        first.begin()
        while not first.is_over():
            time.sleep(_PERIOD_S)
        self._queue.popleft()

    def _drop_all(self) -> None:
        self._queue.popleft()
        while self._queue:
            self._queue.popleft().drop()
