"""The engine: runs the collectives of a rank one at a time, on the calling thread or its own.

All exchanges of a rank, blocking or not, run in the order in which they were called: on the calling
thread if the engine is idle, otherwise on a thread of the engine. This keeps the order the same on
every rank, allows routes of several stages and codecs to be plain blocking code, and ensures that
one thread at a time calls MPI.

On a GPU a job ends when its work is queued. The host does not wait for it (see `Streams`); a
`Watcher` observes queued work. An error found by the watcher is raised by the next call of the
engine, by `Work.wait` or by `Deferred.get`, whichever comes first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, NoReturn, TypeVar, cast

import torch

from torchmn.base import events
from torchmn.base.errors import (
    CommunicationError,
    PeerLostError,
    TimeLimitError,
    TorchmnError,
    UnsupportedError,
)
from torchmn.comm.streams import Deferred, Event, Streams, streams_of
from torchmn.comm.watcher import Held, Watcher
from torchmn.control.messages import EngineStatus

Result = TypeVar("Result")
_REJECTION = "_is_rejection_on_all_ranks"
_FAILING_S = 30.0
_POLL_S = 0.001
_MAX_REFUSED = 3
"""A script that makes this many calls after an error is assumed not to end by itself."""


class Work(Generic[Result]):
    """Handle of a started exchange. `wait` returns its result or raises its error. Local.

    Example:
        >>> work = comm.start_allreduce(torch.ones(2), "sum")
        >>> work.wait().tolist(), work.done
        ([1.0, 1.0], True)
    """

    def __init__(
        self, job: Callable[[], Result], engine: Engine, after: Sequence[Event | None] = ()
    ) -> None:
        self._job: Callable[[], Result] | None = job
        self._engine = engine
        self._done = threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._ready = (engine.streams.record(), *after)
        self._finished: Event | None = None
        self._is_inference = torch.is_inference_mode_enabled()

    @property
    def done(self) -> bool:
        """Whether the exchange has ended."""
        return self._done.is_set()

    def is_done_within(self, seconds: float) -> bool:
        """Wait for up to ``seconds``; returns whether the exchange has ended."""
        return self._done.wait(seconds)

    def wait(self) -> Result:
        """Block until the exchange is done. On CUDA the current stream waits, not the host."""
        if not self._done.is_set():
            self._engine.finish(self)
        if self._error is not None:
            raise self._error
        if self._finished is not None:
            # An aborted sum completes its event too, and would be handed out as a result.
            self._engine.raise_failure()
            streams = self._engine.streams
            streams.wait(self._finished)
            for tensor in _tensors_in(self._result):
                streams.keep(tensor)  # it was allocated on the engine's stream
        return cast(Result, self._result)

    def run(self) -> None:
        """Run the job on this thread, once. Called by the engine only.

        Drops the references to the job and to the events before it. Both would form cycles with the
        owner of this work, such as a bucket, and keep its memory until a garbage collection.
        """
        job, self._job = cast("Callable[[], Result]", self._job), None
        ready, self._ready = self._ready, ()
        engine = self._engine
        try:
            with self._mode_of_the_call(), engine.streams.exchanging():
                for event in ready:
                    engine.streams.wait(event)
                self._result = job()
                self._finished = engine.streams.record()
                if self._finished is not None:
                    engine.watcher.watch(Held(self._finished, job))
        except BaseException as error:  # raised again by `wait`
            self._error = error
        finally:
            del job, ready  # an error keeps the variables of this function
            self._done.set()

    def _mode_of_the_call(self) -> AbstractContextManager[object]:
        """Context that restores the inference mode in which the job was submitted.

        Inference tensors of an evaluation can be changed in place in that mode only. Tensors that a
        job makes for later steps, such as residuals, must not be created in it.
        """
        if torch.is_inference_mode_enabled() == self._is_inference:
            return nullcontext()
        return torch.inference_mode(self._is_inference)


class Engine:
    """Runs jobs one after another in the order of `call` and `submit`. Local to a rank.

    On a GPU every job runs on the engine's stream, whichever thread runs it: jobs share memory
    (scratch buffers, messages, residuals), and only the order of one stream prevents the kernels of
    a job from overwriting what those of the previous job still read. Events synchronize it with the
    streams of the callers.

    With ``has_peers`` a job that fails on this rank alone may leave other ranks in the middle of
    the exchange: no further job is run, even if the script catches the error, and the failure is
    reported to the launcher. A single rank continues.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        has_peers: bool = False,
        streams: Streams | None = None,
    ) -> None:
        self.device = device
        self.streams = streams_of(device) if streams is None else streams
        self._condition = threading.Condition()
        self._queue: deque[Work[object]] = deque()
        self._is_running = False
        self._num_waiting = 0
        self._thread: threading.Thread | None = None
        self._background_id = -1
        self._is_closed = False
        self._has_peers = has_peers
        self._broken: BaseException | None = None
        self._num_refused = 0
        self._failure: BaseException | None = None
        self._has_raised_failure = False
        self._is_failing = False
        self._runner_id = -1
        self.watcher = Watcher(self.streams, self._fail)

    @property
    def is_idle(self) -> bool:
        """Whether no job is queued or running."""
        return not self._queue and not self._is_running

    def status(self, ranks: tuple[int, ...]) -> EngineStatus:
        """Describe what is running and queued, for `torchmn inspect`. From any thread, no lock."""
        return EngineStatus(
            ranks=ranks,
            is_running=self._is_running,
            num_queued=len(self._queue),
            num_on_device=self.watcher.num_held,
        )

    def is_eager(self) -> bool:
        """Whether the running exchange may busy-wait: no thread of this rank computes meanwhile."""
        return self._num_waiting > 0 or threading.get_ident() != self._background_id

    @property
    def may_queue(self) -> bool:
        """Whether the caller is a job of a GPU, which may return while its work is still queued."""
        return not self.streams.is_host and threading.get_ident() == self._runner_id

    def fetch(self, values: torch.Tensor) -> Deferred:
        """Start a copy of ``values`` to the host, in order with the current stream.

        `Deferred.get` raises the error of an exchange that fails in the meantime.
        """
        return self.streams.fetch(values, self.raise_failure)

    def raise_failure(self) -> None:
        """Raise the error of queued work, if any; results on the device are undefined after it.

        The first call raises the error itself, later calls CommunicationError.
        """
        if not self._is_failing:
            return
        # The thread that called `begin_to_fail` aborts the transport first, then sets the error.
        until_s = time.monotonic() + _FAILING_S
        while self._broken is None and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        if self._failure is not None and not self._has_raised_failure:
            self._has_raised_failure = True
            raise self._failure
        self._refuse(self._broken or CommunicationError("An exchange has failed."))

    def begin_to_fail(self) -> None:
        """Hand out no more results of a device: a collective is failing. From any thread."""
        self._is_failing = not self.streams.is_host

    def raise_if_capturing(self) -> None:
        """Raise UnsupportedError if the current stream is capturing a CUDA graph."""
        if not self.streams.is_host and self.streams.is_capturing():
            raise UnsupportedError(
                "A CUDA graph is being captured, and this exchange between ranks cannot be part of "
                "it: time limits and the comparison of ranks need the host in each step, which a "
                "replayed graph leaves out. Capture forward and backward of the model only, by "
                "torch.compile(model, mode='reduce-overhead') or "
                "torch.cuda.make_graphed_callables, and call backward() and step() outside."
            )

    def call(self, job: Callable[[], Result], after: Sequence[Event | None] = ()) -> Result:
        """Run a job and return its result, on this thread if the engine is idle.

        See `submit` for ``after``.
        """
        self._raise_if_unusable()
        if not self._take_over():
            return self.submit(job, after).wait()
        for observer in events.observers:
            observer.phase("exchange", begins=True)
        try:
            if self.streams.is_host:
                return job()
            work = Work(job, self, after)
            self._run_work(work)
            return work.wait()
        except BaseException as error:
            self._note(error)
            raise
        finally:
            for observer in events.observers:
                observer.phase("exchange", begins=False)
            self._hand_back()

    def _take_over(self) -> bool:
        """Reserve an idle engine for the calling thread, which must call `_hand_back` afterwards.

        Returns False if a job is queued or running.
        """
        with self._condition:
            if self._queue or self._is_running:
                return False
            self._is_running = True
            return True

    def _hand_back(self) -> None:
        with self._condition:
            self._is_running = False
            if self._queue:  # jobs submitted meanwhile: the engine's thread waits for the flag
                self._condition.notify_all()

    def _run_work(self, work: Work[Result]) -> None:
        self._runner_id = threading.get_ident()
        try:
            work.run()
        finally:
            self._runner_id = -1

    def submit(
        self,
        job: Callable[[], Result],
        after: Sequence[Event | None] = (),
        *,
        only_queues: bool = False,
    ) -> Work[Result]:
        """Queue a job and return at once.

        The job waits for everything queued on the caller's current stream, and for the events
        ``after``, of other streams that write what the job reads. A job that ``only_queues`` work
        on a device runs on this thread if the engine is idle: another thread would compete with
        this one for the interpreter.
        """
        self._raise_if_unusable()
        work = Work(job, self, after)
        if only_queues and not self.streams.is_host and self._take_over():
            try:
                self._run(cast("Work[object]", work))
            finally:
                self._hand_back()
            return work
        # The order of this queue is that of the script's calls, whichever thread runs the jobs: all
        # ranks must run the same exchanges in the same order.
        with self._condition:
            self._queue.append(cast("Work[object]", work))
            if self._thread is None:
                # A daemon: a wait for a lost peer does not keep the process from exiting.
                self._thread = threading.Thread(
                    target=self._loop, name="torchmn-exchange", daemon=True
                )
                self._thread.start()
            self._condition.notify_all()
        return work

    def finish(self, work: Work[Result]) -> None:
        """Block until ``work`` is done. Each collective in it has a time limit of its own."""
        for observer in events.observers:
            observer.phase("exchange", begins=True)
        try:
            self._await(work)
        finally:
            for observer in events.observers:
                observer.phase("exchange", begins=False)

    def _await(self, work: Work[Result]) -> None:
        self._num_waiting += 1
        try:
            # With a timeout, to notice a thread that has ended: nothing else would end this wait.
            while not work._done.wait(timeout=1.0):
                if self._thread is None or not self._thread.is_alive():
                    raise CommunicationError("The exchange thread ended before its work.")
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Complete queued jobs, then end the threads; later calls raise CommunicationError.

        Raises the error of queued device work if no call has raised it yet.
        """
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        # The other ranks run what is queued, and would wait for this one. Only then may the watcher
        # end, which the last of these jobs may still give work to watch.
        if self._thread is not None:
            self._thread.join()
        self.watcher.close()
        if self._failure is not None and not self._has_raised_failure:
            self.raise_failure()

    def _fail(self, error: BaseException) -> None:
        """Store the error of queued work for the next call. Called on the watcher's thread."""
        if self._broken is None:
            self._failure = error
            # In this order: a thread that sees the flag waits for `_broken`, see `raise_failure`.
            self._broken, self._is_failing = error, True

    def _raise_if_unusable(self) -> None:
        if self._is_failing:
            self.raise_failure()
        self.raise_if_capturing()
        if self._broken is not None:
            self._refuse(self._broken)
        if self._is_closed:
            raise CommunicationError("This communicator was finalized. Create a new one.")

    def _refuse(self, error: BaseException) -> NoReturn:
        self._num_refused += 1
        if self._num_refused == _MAX_REFUSED:
            for observer in events.observers:
                observer.failed(error)
        raise CommunicationError(
            f"This communicator cannot be used after an exchange failed: {error}"
        ) from error

    def _loop(self) -> None:
        self._background_id = threading.get_ident()
        # torch passes its number of threads to its BLAS when a thread first asks for it. Without
        # this the first matrix product, of PowerSGD, would use all cores and have other bits.
        torch.get_num_threads()
        self.streams.enter_thread()
        has_run = False
        while True:
            with self._condition:
                if has_run:
                    self._is_running = False
                while self._is_running or not self._queue:
                    if self._is_closed and not self._queue:
                        return
                    self._condition.wait()
                self._is_running = has_run = True
            # Without the lock: as long as `_is_running` is set, no other thread takes jobs. In no
            # variable, which would keep the work alive while the thread waits for the next one.
            self._run(self._queue.popleft())

    def _run(self, work: Work[object]) -> None:
        # The other ranks may be in a different exchange by now, so queued jobs must not start.
        if self._broken is not None:
            work._job, work._ready, work._error = None, (), self._broken
            work._done.set()
            return
        self._run_work(work)
        if work._error is not None:
            self._note(work._error)

    def _note(self, error: BaseException) -> None:
        """Store an error after which the ranks may no longer agree on the next exchange."""
        # A RankMismatchError is raised by all ranks in the same exchange, so they can continue. An
        # error of torch or Python may be raised on this rank alone.
        is_peer = isinstance(error, (TimeLimitError, PeerLostError))
        is_own = type(error) is CommunicationError or not isinstance(error, TorchmnError)
        is_own = is_own and self._has_peers and not getattr(error, _REJECTION, False)
        # A collective that fails on a device is aborted, and its transport is of no use any more.
        if self._broken is None and (is_peer or is_own or self._is_failing):
            self._broken = error
            if is_own and isinstance(error, Exception):
                for observer in events.observers:
                    observer.failed(error)


def mark_as_rejection(error: Exception) -> None:
    """Mark an invalid argument that was reported to all ranks: the communicator stays usable."""
    setattr(error, _REJECTION, True)


def _tensors_in(result: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a result, including those in nested tuples, lists and dicts."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from _tensors_in(each)
    elif isinstance(result, dict):
        for each in result.values():
            yield from _tensors_in(each)
