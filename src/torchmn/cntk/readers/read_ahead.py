"""Threads that read and decode while the training computes."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

from torchmn.cntk.readers.deserializer import Chunk
from torchmn.errors import DataError, TorchmnError

Result = TypeVar("Result")

EXIT_TIME_S = 5.0
"""How long the end of the interpreter waits for a read that has begun; one that hangs, as on a lost
network disk, does not hold it."""


class Threads:
    """Daemon threads that run functions in order. Started on first use, and again after a fork."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None]
        self._close: weakref.finalize[..., Threads] | None = None
        self._process: int | None = None

    def run(self, function: Callable[[], Result]) -> Future[Result]:
        """Run a function soon."""
        if self._process != os.getpid():
            self._start()
        future: Future[Result] = Future()
        self._tasks.put((function, future))  # type: ignore[arg-type]
        return future

    def close(self) -> None:
        """Drop what has not begun, and wait for what has."""
        if self._close is not None and self._process == os.getpid():
            self._close()
        self._process = None

    def _start(self) -> None:
        if self._close is not None:
            self._close.detach()  # those of the parent process
        tasks = self._tasks = queue.SimpleQueue()
        threads = [
            threading.Thread(target=_work, args=(tasks,), name=f"{self._name}-{i}", daemon=True)
            for i in range(self._num_threads)
        ]
        for thread in threads:
            thread.start()
        self._close = weakref.finalize(self, _end, tasks, threads)
        self._process = os.getpid()

    def __reduce__(self) -> tuple[object, ...]:
        return Threads, (self._num_threads, self._name)


def _work(tasks: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None]) -> None:
    while (task := tasks.get()) is not None:
        function, future = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:  # delivered on the training thread
                future.set_exception(error)
        del task, function, future


def _end(
    tasks: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None],
    threads: list[threading.Thread],
) -> None:
    while not tasks.empty():
        try:
            task = tasks.get_nowait()
        except queue.Empty:
            break
        if task is not None:
            task[1].cancel()
    for _ in threads:
        tasks.put(None)
    deadline = time.monotonic() + EXIT_TIME_S
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


class Chunks:
    """The chunks in memory. Each is read once while it is kept, by whichever thread needs it."""

    def __init__(self, read: Callable[[int], Chunk], name: str) -> None:
        self._read = read
        self._name = name
        self._lock = threading.Lock()
        self._futures: dict[int, Future[Chunk]] = {}
        self._here: dict[int, Chunk] = {}
        self._kept: frozenset[int] = frozenset()

    def __call__(self, chunk_id: int) -> Chunk:
        """The chunk, read now if it is not here. Raises DataError: it cannot be read."""
        here = self._here.get(chunk_id)
        if here is not None:
            return here
        with self._lock:
            future = self._futures.get(chunk_id)
            if is_reader := future is None:
                future = self._futures[chunk_id] = Future()
        if is_reader:
            try:
                chunk = self._read(chunk_id)
                with self._lock:
                    if self._futures.get(chunk_id) is future:
                        self._here[chunk_id] = chunk
                future.set_result(chunk)
            except BaseException as error:
                with self._lock:
                    if self._futures.get(chunk_id) is future:
                        del self._futures[chunk_id]
                future.set_exception(named_error(error, f"Chunk {chunk_id} of {self._name}"))
        return future.result()

    def keep_only(self, chunk_ids: Iterable[int]) -> None:
        """Drop all others."""
        with self._lock:
            self._kept = frozenset(chunk_ids)
            for chunk_id in [c for c in self._futures if c not in self._kept]:
                del self._futures[chunk_id]
                self._here.pop(chunk_id, None)

    def read_ahead(self, chunk_id: int) -> None:
        """Read a chunk, unless it is no longer one to keep. An error is left to who needs it."""
        if chunk_id in self._kept:
            with suppress(Exception):
                self(chunk_id)

    def __reduce__(self) -> tuple[object, ...]:
        return Chunks, (self._read, self._name)


def named_error(error: BaseException, what: str) -> BaseException:
    """The error for the training thread: torchmn's own say what was read, others get it added."""
    if isinstance(error, TorchmnError) or not isinstance(error, Exception):
        return error
    named = DataError(f"{what} cannot be read: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


class Deferred(Generic[Result]):
    """A function that runs when its result is asked for, in place of a future."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function

    def result(self) -> Result:
        """Run the function."""
        return self._function()

    def cancel(self) -> bool:
        """There is nothing to cancel."""
        return True
