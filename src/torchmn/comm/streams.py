"""Streams, events and deferred values: the order between an exchange and the work of a device.

Operations on a GPU are asynchronous: calls return before the work is done. A stream that reads
memory written by another stream must wait for an event of that stream, and the host may read a
number only after it has arrived in host memory. The exchange does all of this through `Streams`, so
that tests can replace it by simulated queues that run late and out of step.

Operations on the CPU are complete when a call returns: `HostStreams` has nothing to wait for.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol, cast

import torch
from torch import Tensor

_POLL_S = 0.00005
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Event(Protocol):
    """A marker at a position of a stream."""

    def query(self) -> bool:
        """Whether the device has completed all work before the event. Does not block."""


class Deferred:
    """Values of a device that are being copied to the host. Local.

    The copy is queued behind the work that computes the values. `ready` tells whether it has
    completed and does not block. `get` blocks until then, so call it as late as possible, such as
    one step later.

    ``check`` is called while `get` waits and before it returns: it raises the error of an exchange
    that failed in the meantime, after which the values would be undefined.

    >>> from torchmn.comm.streams import streams_of
    >>> deferred = streams_of(torch.device("cpu")).fetch(torch.ones(2))
    >>> deferred.ready(), deferred.get().tolist()
    (True, [1.0, 1.0])
    """

    def __init__(
        self,
        host: Tensor,
        event: Event | None = None,
        *,
        check: Callable[[], None] = lambda: None,
        give_back: Callable[[Tensor, Event], None] = lambda host, event: None,
    ) -> None:
        self._host = host
        self._event = event
        self._check = check
        self._give_back = give_back
        self._values: Tensor | None = None

    def ready(self) -> bool:
        """Whether `get` would return without blocking."""
        return self._values is not None or self._event is None or self._event.query()

    def get(self) -> Tensor:
        """The values as a CPU tensor that the caller may keep. Blocks until they have arrived."""
        if self._values is None:
            while not self.ready():
                self._check()
                time.sleep(_POLL_S)
            self._check()  # again: an aborted exchange completes the event, too
            self._values = self._host.clone()  # the pinned memory goes back to its pool
        return self._values

    def __del__(self) -> None:
        if self._event is not None:
            self._give_back(self._host, self._event)


class Streams(ABC):
    """The streams of one device. Local. "Current" refers to the calling thread."""

    is_host = False
    """Whether operations are complete when their call returns, as on the CPU."""

    @abstractmethod
    def record(self) -> Event | None:
        """Record an event on the current stream; None if the device has no streams."""

    @abstractmethod
    def wait(self, event: Event | None) -> None:
        """Make later work of the current stream wait for an event. The host does not wait."""

    def current(self) -> Hashable:
        """The current stream, as a value that compares equal for the same stream."""
        return None

    def wait_for(self, stream: Hashable) -> None:
        """Make later work of the current stream wait for all work queued on ``stream`` so far."""
        return

    @abstractmethod
    def exchanging(self) -> AbstractContextManager[object]:
        """Context in which the current stream is the one for this rank's exchanges."""

    @abstractmethod
    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor's memory from being reused before the current stream has used it."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the current stream is capturing a CUDA graph, so that nothing is executed."""

    @abstractmethod
    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Pinned host memory (numel,) for asynchronous copies, not in use by another copy."""

    @abstractmethod
    def give_back(self, host: Tensor, event: Event) -> None:
        """Return memory to `pinned`, which reuses it after the event has completed."""

    def fetch(self, values: Tensor, check: Callable[[], None] = lambda: None) -> Deferred:
        """Start to copy values to the host, in order with the current stream."""
        host = self.pinned(values.numel(), values.dtype)
        host.copy_(values.detach().reshape(-1), non_blocking=True)
        return Deferred(host, self.record(), check=check, give_back=self.give_back)

    def send(self, values: Tensor, into: Tensor) -> None:
        """Copy host values into device memory, in order with the current stream.

        ``values`` may be changed after the call. The host does not wait for the device.
        """
        # Converted to the dtype of the device here: torch would convert into memory that is not
        # pinned, and a copy from that may wait for the stream.
        host = self.pinned(values.numel(), into.dtype)
        host.copy_(values.reshape(-1))
        into.copy_(host.view(into.shape), non_blocking=True)
        event = self.record()
        if event is not None:
            self.give_back(host, event)

    def enter_thread(self) -> None:
        """Prepare the calling thread for work with this device. Called once per thread."""
        return


class HostStreams(Streams):
    """Streams of the CPU, on which every operation is complete when its call returns."""

    is_host = True

    def record(self) -> Event | None:
        return None

    def wait(self, event: Event | None) -> None:
        return

    def exchanging(self) -> AbstractContextManager[object]:
        return nullcontext()

    def keep(self, tensor: Tensor) -> None:
        return

    def is_capturing(self) -> bool:
        return False

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    def give_back(self, host: Tensor, event: Event) -> None:
        return

    def fetch(self, values: Tensor, check: Callable[[], None] = lambda: None) -> Deferred:
        """Return a copy of the values, which is ready at once."""
        return Deferred(values.detach().clone(), check=check)

    def send(self, values: Tensor, into: Tensor) -> None:
        into.copy_(values)


class CudaStreams(Streams):
    """Streams of one GPU. Exchanges have a stream of their own, which is made on first use."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    def record(self) -> Event:
        event = _PooledEvent(self.device)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: Event | None) -> None:
        if event is not None:
            event.wait(torch.cuda.current_stream(self.device))  # type: ignore[attr-defined]

    def current(self) -> Hashable:
        return torch.cuda.current_stream(self.device)

    def wait_for(self, stream: Hashable) -> None:
        torch.cuda.current_stream(self.device).wait_stream(cast(torch.cuda.Stream, stream))

    def exchanging(self) -> AbstractContextManager[object]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._stream)

    def keep(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return _memory.take(numel, dtype)

    def give_back(self, host: Tensor, event: Event) -> None:
        _memory.give_back(host, event)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)  # the current device of a new thread is GPU 0
        # By default a capture of a CUDA graph on one thread fails if another thread makes a call
        # that could be unsafe in a capture, such as a query of an event. The relaxed mode declares
        # that this thread does not take part in captures.
        with suppress(OSError, AttributeError):  # a torch that is built for other devices
            driver = ctypes.CDLL("libcuda.so.1")
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def streams_of(device: torch.device) -> Streams:
    """The `Streams` of a device. CUDA streams are not created before they are used."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


# Events and pinned memory live as long as the process and are reused.
#
# Destroying one is a CUDA call, which a forked process, such as a DataLoader worker, must not make.
# It would make one when its garbage collector frees an object of the parent that holds an event:
# torch then ends the worker (`CUDA error: initialization error`). So holders return events and
# memory to these pools when they are freed, which involves Python only. This also avoids creating
# them in each step.

_Event = torch.cuda.Event
_free_events: defaultdict[torch.device, deque[_Event]] = defaultdict(deque)


class _PooledEvent:
    """A CUDA event that returns to the pool when this object is freed."""

    __slots__ = ("_event", "_free")

    def __init__(self, device: torch.device) -> None:
        self._free = _free_events[device]
        try:
            self._event = self._free.popleft()
        except IndexError:
            self._event = _Event()

    def record(self, stream: torch.cuda.Stream) -> None:
        # Safe for an event that streams still wait for: they wait for the position that it had when
        # they were told to, and recording it again does not change that.
        self._event.record(stream)

    def wait(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)

    def query(self) -> bool:
        return bool(self._event.query())

    def __del__(self) -> None:
        self._free.append(self._event)


class MemoryPool:
    """A pool of host memory for asynchronous copies, each piece with the event of its last copy."""

    def __init__(self, allocate: Callable[[int, torch.dtype], Tensor]) -> None:
        self._allocate = allocate
        self._free: defaultdict[tuple[int, torch.dtype], deque[tuple[Tensor, Event]]]
        self._free = defaultdict(deque)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory (numel,) that no pending copy uses."""
        free = self._free[numel, dtype]
        for _ in range(len(free)):
            try:
                host, event = free.popleft()
            except IndexError:  # another thread took the last one
                break
            if event.query():
                return host
            free.append((host, event))
        with torch.inference_mode(False):  # it is reused outside inference mode
            return self._allocate(numel, dtype)

    def give_back(self, host: Tensor, event: Event) -> None:
        """Return memory, to be reused after the event has completed."""
        self._free[host.numel(), host.dtype].append((host, event))


_memory = MemoryPool(
    lambda numel, dtype: torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
)
