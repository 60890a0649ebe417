"""Threads that read and decode while the training computes."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torchmn.base.errors import DataError, TorchmnError
from torchmn.cntk.readers.deserializer import Chunk, Deserializer, StreamInformation
from torchmn.cntk.readers.minibatch import MinibatchData
from torchmn.cntk.readers.minibatch_plan import MinibatchPlan, PlannedMinibatch, Progress, Request

Result = TypeVar("Result")

# How long the end of the interpreter waits for a read that has begun; one that hangs, as on a lost
# network disk, does not hold it.
EXIT_TIME_S = 5.0


class Threads:
    """Daemon threads that run functions in order. Started on first use, and again after a fork."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None]
        self._close: weakref.finalize[..., Threads] | None = None
        self._process: int | None = None

    def run(self, function: Callable[[], Result]) -> Future[Result]:
        """Queue a function for the next idle thread, and return its future."""
        if self._process != os.getpid():
            self._start()
        future: Future[Result] = Future()
        self._tasks.put((function, future))  # type: ignore[arg-type]
        return future

    def close(self) -> None:
        """Cancel functions that have not started; wait for the others, up to `EXIT_TIME_S`."""
        if self._close is not None and self._process == os.getpid():
            self._close()
        self._process = None

    def _start(self) -> None:
        if self._close is not None:
            self._close.detach()  # a forked child must not wait for the threads of its parent
        tasks = self._tasks = queue.SimpleQueue()
        threads = [
            threading.Thread(target=_work, args=(tasks,), name=f"{self._name}-{i}", daemon=True)
            for i in range(self._num_threads)
        ]
        for thread in threads:
            thread.start()
        # Runs at exit, where daemon threads would be stopped in mid-read, or when this object is
        # collected: the threads hold no reference to it.
        self._close = weakref.finalize(self, _end, tasks, threads)
        self._process = os.getpid()


def _work(tasks: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None]) -> None:
    while (task := tasks.get()) is not None:
        function, future = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:  # delivered on the training thread
                future.set_exception(error)
        del task, function, future  # while waiting, a thread must not keep its last result alive


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
        self._kept: frozenset[int] = frozenset()

    def __call__(self, chunk_id: int) -> Chunk:
        """The chunk, read now if it is not here. Raises DataError: it cannot be read."""
        # The lock is not held while a chunk is read: one thread reads it, and those that need the
        # same one wait for its future. `keep_only` may drop the chunk in the meantime.
        with self._lock:
            future = self._futures.get(chunk_id)
            if is_reader := future is None:
                future = self._futures[chunk_id] = Future()
        if is_reader:
            try:
                future.set_result(self._read(chunk_id))
            except BaseException as error:
                with self._lock:
                    if self._futures.get(chunk_id) is future:
                        del self._futures[chunk_id]
                future.set_exception(named_error(error, f"Chunk {chunk_id} of {self._name}"))
        return future.result()

    def keep_only(self, chunk_ids: Iterable[int]) -> None:
        """Drop all chunks but these."""
        with self._lock:
            self._kept = frozenset(chunk_ids)
            for chunk_id in [c for c in self._futures if c not in self._kept]:
                del self._futures[chunk_id]

    def read_ahead(self, chunk_id: int) -> None:
        """Read a chunk, unless it is no longer one to keep. Errors are raised where it is used."""
        if chunk_id in self._kept:
            with suppress(Exception):
                self(chunk_id)


def named_error(error: BaseException, what: str) -> BaseException:
    """Add what could not be read to an error for the training thread; torchmn's errors name it."""
    if isinstance(error, TorchmnError) or not isinstance(error, Exception):
        return error
    named = DataError(f"{what} cannot be read: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


@dataclass(frozen=True, eq=False)
class MinibatchInProgress:
    """A minibatch that is being read, and the progress of the source after it."""

    request: Request
    after: Progress
    minibatch: PlannedMinibatch
    streams: Future[dict[str, MinibatchData]]


class MinibatchesAhead:
    """Reads the minibatches of a plan, some of them before they are asked for. Local.

    In memory are the chunks of the blocks that these minibatches are from, and those of the next
    block as its turn comes near. A process that was forked begins with nothing read: threads do not
    survive a fork.

    Args:
        plan: says which minibatches there are.
        deserializer: has their sequences.
        streams: the streams of the deserializer.
        seed: the seed of the source, for random transforms.
        num_threads: threads that decode; 0: each minibatch is read when it is asked for.
    """

    def __init__(
        self,
        plan: MinibatchPlan,
        deserializer: Deserializer,
        streams: Sequence[StreamInformation],
        seed: int,
        num_threads: int,
    ) -> None:
        self._plan = plan
        self._deserializer = deserializer
        self._streams = streams
        self._seed = seed
        self._num_threads = num_threads
        self._begin_process()

    def first(self, progress: Progress, request: Request) -> MinibatchInProgress | None:
        """The minibatch at ``progress``, None at the end; start reading those after it."""
        self._notice_fork()
        if self._begun and self._begun[0].request != request:
            self.forget()
        self._begin(progress, request, at_least=max(self._num_ahead, 1))
        return self._begun[0] if self._begun else None

    def begin_another(self, progress: Progress, request: Request) -> None:
        """Start reading one more, in place of the first one, which has been read.

        An error of a later minibatch is raised in the call that asks for it.
        """
        if self._num_ahead:
            with suppress(Exception):
                self._begin(progress, request, at_least=self._num_ahead + 1)

    def drop_first(self) -> None:
        """Forget the first minibatch, which has been delivered."""
        self._begun.popleft()

    def forget(self) -> None:
        """Drop all minibatches: the next call does not ask for them."""
        self._notice_fork()
        for each in self._begun:
            each.streams.cancel()
        self._begun.clear()

    def close(self) -> None:
        """End the threads, and drop what they have read. A later call resumes."""
        self.forget()
        self._threads.close()
        self._loader.close()
        self._chunks.keep_only(())

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles start with nothing read."""
        made_of = self._plan, self._deserializer, self._streams, self._seed, self._num_threads
        return MinibatchesAhead, made_of

    def _begin(self, progress: Progress, request: Request, at_least: int) -> None:
        """Start reading minibatches until ``at_least`` of them are in progress."""
        while len(self._begun) < at_least:
            before = self._begun[-1].after if self._begun else progress
            minibatch = self._plan.take(before, request)
            if minibatch is None:
                return
            after = before.after(minibatch)
            part = request.num_partitions, request.partition
            read = partial(minibatch.read, *part, self._streams, self._chunks, self._seed)
            if self._num_ahead:
                streams = self._threads.run(read)
            else:
                streams = Future()
                streams.set_result(read())
            self._begun.append(MinibatchInProgress(request, after, minibatch, streams))
            self._move_window(before)

    def _move_window(self, progress: Progress) -> None:
        """Drop the chunks of blocks that are done, and read those of the next block in time."""
        if self._plan.keeps_all_chunks:
            return
        current = self._plan.chunk_ids(progress)
        used = {chunk for each in self._begun for chunk in each.minibatch.chunk_ids}
        used.update(current)
        ahead: tuple[int, ...] = ()
        if len(used) == len(current):
            ahead = self._plan.next_chunk_ids(progress)
        self._chunks.keep_only(used | set(ahead))
        if self._num_ahead:
            for chunk_id in sorted(set(ahead) - self._chunks_ahead):
                self._loader.run(partial(self._chunks.read_ahead, chunk_id))
            self._chunks_ahead.clear()
            self._chunks_ahead.update(ahead)

    def _notice_fork(self) -> None:
        """Start anew in a forked process, which has none of its parent's threads."""
        if os.getpid() != self._process:
            self._begin_process()

    def _begin_process(self) -> None:
        self._process = os.getpid()
        self._begun: deque[MinibatchInProgress] = deque()
        self._chunks_ahead: set[int] = set()
        self._num_ahead = self._num_threads and self._num_threads + 1
        self._chunks = Chunks(self._deserializer.get_chunk, repr(self._deserializer))
        self._threads = Threads(self._num_threads, "torchmn-decode")
        self._loader = Threads(1, "torchmn-read")
