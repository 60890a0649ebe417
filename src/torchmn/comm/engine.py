"""One collective at a time: on the calling thread when idle, otherwise on a thread of the engine.

All exchanges of a rank, blocking or not, pass through its engine in the order in which they were
called. This keeps the order the same on every rank, lets routes of several stages and codecs be
written as plain blocking code, and gives MPI what it needs: one thread at a time.

On a GPU a job has ended when its work is queued; the host waits for none of it (see `Streams`), and
a `Watcher` looks at what is queued. An error that it finds is raised by the next call of the
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

Result = TypeVar("Result")
_REJECTION = "_is_rejection_on_all_ranks"
_FAILING_S = 30.0
_POLL_S = 0.001
_MAX_REFUSED = 3
"""A script that has caught the error and makes this many calls will not end by itself."""


class Work(Generic[Result]):
    """A started exchange. `wait` returns its result or raises its error. Local.

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
        """Whether the exchange has ended, waiting for it so long."""
        return self._done.wait(seconds)

    def wait(self) -> Result:
        """Block until done; on CUDA the caller's stream waits, not the host."""
        if not self._done.is_set():
            self._engine.finish(self)
        if self._error is not None:
            raise self._error
        if self._finished is not None:
            self._engine.raise_failure()
            streams = self._engine.streams
            streams.wait(self._finished)
            for tensor in _tensors_in(self._result):
                streams.keep(tensor)  # it was allocated on the engine's stream
        return cast(Result, self._result)

    def run(self) -> None:
        """Run the job on this thread, once. Called by the engine only.

        The job and the events before it are let go of: both would form cycles with what holds this
        work, such as a bucket, and the memory of a training would stay until these are collected.
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
        """Inference mode where the job was submitted in it, and in no other case.

        Tensors of an evaluation can be changed in place in that mode only, and those that a job
        makes for later steps, such as residuals, must not be made in it.
        """
        if torch.is_inference_mode_enabled() == self._is_inference:
            return nullcontext()
        return torch.inference_mode(self._is_inference)


class Engine:
    """Runs jobs one after another in the order of `call` and `submit`. Local to a rank.

    ``is_threaded=False`` (an MPI that forbids calls from a second thread) makes `submit` only
    queue; the jobs then run on the thread that waits, without overlap.

    On a GPU every job runs on the engine's stream, whichever thread runs it: jobs share memory
    (scratch, messages, residuals), and only the order of one stream keeps the kernels of the next
    one from writing what those of the last one still read. Events order it with the streams of the
    callers.

    With ``has_peers`` a job that fails on this rank alone may have left others in the middle of it:
    no further one is run, whatever the script does with the error, and the launcher gets a report.
    A rank by itself continues.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        is_threaded: bool = True,
        has_peers: bool = False,
        streams: Streams | None = None,
    ) -> None:
        self.device = device
        self.streams = streams_of(device) if streams is None else streams
        self.is_threaded = is_threaded
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
        """Whether nothing is queued and nothing runs."""
        return not self._queue and not self._is_running

    def is_eager(self) -> bool:
        """Whether the running exchange may spin: no thread of this rank computes meanwhile."""
        return self._num_waiting > 0 or threading.get_ident() != self._background_id

    @property
    def may_queue(self) -> bool:
        """Whether the caller is a job that may leave its work queued on the device."""
        return not self.streams.is_host and threading.get_ident() == self._runner_id

    def fetch(self, values: torch.Tensor) -> Deferred:
        """Start to copy numbers to the host, behind the work of the current stream.

        `Deferred.get` raises the error of an exchange that fails meanwhile.
        """
        return self.streams.fetch(values, self.raise_failure)

    def raise_failure(self) -> None:
        """Raise the error of queued work, after which nothing on the device means anything.

        As it is the first time, then CommunicationError.
        """
        if not self._is_failing:
            return
        until_s = time.monotonic() + _FAILING_S  # another thread ends it, and then says why
        while self._broken is None and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        if self._failure is not None and not self._has_raised_failure:
            self._has_raised_failure = True
            raise self._failure
        self._refuse(self._broken or CommunicationError("An exchange has failed."))

    def begin_to_fail(self) -> None:
        """From now on nothing of the device is handed out: a collective fails. From any thread."""
        self._is_failing = not self.streams.is_host

    def raise_if_capturing(self) -> None:
        """Raise UnsupportedError if the caller records a CUDA graph. Before anything is started."""
        if not self.streams.is_host and self.streams.is_capturing():
            raise UnsupportedError(
                "A CUDA graph is being captured, and this exchange between ranks cannot be part of "
                "it: time limits and the comparison of ranks need the host in each step, which a "
                "replayed graph leaves out. Capture forward and backward of the model only, by "
                "torch.compile(model, mode='reduce-overhead') or "
                "torch.cuda.make_graphed_callables, and call backward() and step() outside."
            )

    def call(self, job: Callable[[], Result], after: Sequence[Event | None] = ()) -> Result:
        """Run a job and return its result; on this thread if nothing is in flight.

        ``after``: see `submit`.
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
        """Whether nothing is in flight: the calling thread may then run a job, and hands back."""
        with self._condition:
            if self._queue or self._is_running:
                return False
            self._is_running = True
            return True

    def _hand_back(self) -> None:
        with self._condition:
            self._is_running = False
            if self._queue:
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

        It waits for what is queued on the current stream of the caller, and for the events
        ``after``: those of other streams that write what it reads. A job that ``only_queues`` its
        work on a device runs on this thread if nothing is in flight: another one would take the
        interpreter from it.
        """
        self._raise_if_unusable()
        work = Work(job, self, after)
        if only_queues and not self.streams.is_host and self._take_over():
            try:
                self._run(cast("Work[object]", work))
            finally:
                self._hand_back()
            return work
        with self._condition:
            self._queue.append(cast("Work[object]", work))
            if self.is_threaded and self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, name="torchmn-exchange", daemon=True
                )
                self._thread.start()
            self._condition.notify_all()
        return work

    def finish(self, work: Work[Result]) -> None:
        """Wait until ``work`` is done. Every collective in it has its own time limit."""
        for observer in events.observers:
            observer.phase("exchange", begins=True)
        try:
            self._await(work)
        finally:
            for observer in events.observers:
                observer.phase("exchange", begins=False)

    def _await(self, work: Work[Result]) -> None:
        if not self.is_threaded:
            while not work.done and self._queue:
                self._run(self._queue.popleft())
            return
        self._num_waiting += 1
        try:
            while not work._done.wait(timeout=1.0):
                if self._thread is None or not self._thread.is_alive():
                    raise CommunicationError("The exchange thread ended before its work.")
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Complete what is queued, then end the threads; later calls raise CommunicationError.

        Raises the error of queued work that no call has raised yet.
        """
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.watcher.close()
        if self._failure is not None and not self._has_raised_failure:
            self.raise_failure()

    def _fail(self, error: BaseException) -> None:
        """Queued work has failed: the next call raises it. Called on the watcher's thread."""
        if self._broken is None:
            self._failure = error
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
            self._run(self._queue.popleft())  # in no variable, which would keep it while waiting

    def _run(self, work: Work[object]) -> None:
        if self._broken is not None:
            work._job, work._ready, work._error = None, (), self._broken
            work._done.set()
            return
        self._run_work(work)
        if work._error is not None:
            self._note(work._error)

    def _note(self, error: BaseException) -> None:
        """Remember an error after which the ranks no longer agree on what comes next."""
        is_peer = isinstance(error, (TimeLimitError, PeerLostError))
        is_own = type(error) is CommunicationError or not isinstance(error, TorchmnError)
        is_own = is_own and self._has_peers and not getattr(error, _REJECTION, False)
        if self._broken is None and (is_peer or is_own):
            self._broken = error
            if is_own and isinstance(error, Exception):
                for observer in events.observers:
                    observer.failed(error)


def mark_as_rejection(error: Exception) -> None:
    """Note that all ranks know of this error of an argument: the communicator stays usable."""
    setattr(error, _REJECTION, True)


def _tensors_in(result: object) -> Iterator[torch.Tensor]:
    """The tensors of a result, also inside of tuples, lists and dicts."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from _tensors_in(each)
    elif isinstance(result, dict):
        for each in result.values():
            yield from _tensors_in(each)
