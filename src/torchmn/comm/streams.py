"""Streams, events and deferred values: how an exchange orders its work with that of a device.

A call that works on a GPU only queues: it returns before the work is done. Whoever reads memory
that another stream writes has to wait for an event of that stream, and the host reads a number only
after it has arrived in host memory. `Streams` is the one place through which the exchange does all
of that, so that tests can replace it by queues which run late and out of step.

On the CPU work is done when a call returns: `HostStreams` has nothing to wait for.
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
    """A position in a stream."""

    def query(self) -> bool:
        """Whether the device has done everything before it. Never waits."""


class Deferred:
    """Numbers on their way from a device to the host. Local.

    The copy was queued behind the work that computes them. `ready` looks whether they have arrived
    and never waits; `get` waits for them, so call it late: one step later they are there.

    ``check`` is called before the numbers are handed out and while they are waited for: it raises
    the error of an exchange that failed meanwhile, after which the numbers would mean nothing.

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
        """Whether `get` would return at once."""
        return self._values is not None or self._event is None or self._event.query()

    def get(self) -> Tensor:
        """The numbers, a CPU tensor of the caller's own; waits until they are there."""
        if self._values is None:
            while not self.ready():
                self._check()
                time.sleep(_POLL_S)
            self._check()
            self._values = self._host.clone()
        return self._values

    def __del__(self) -> None:
        if self._event is not None:
            self._give_back(self._host, self._event)


class Streams(ABC):
    """The streams of one device. Local; "current" means: of the calling thread."""

    is_host = False
    """Whether work is done when the call that asks for it returns."""

    @abstractmethod
    def record(self) -> Event | None:
        """An event behind all that is queued on the current stream; None if there is no queue."""

    @abstractmethod
    def wait(self, event: Event | None) -> None:
        """Let later work of the current stream wait for an event. The host does not wait."""

    def current(self) -> Hashable:
        """The current stream; the same value for the same stream."""
        return None

    def wait_for(self, stream: Hashable) -> None:
        """Let later work of the current stream wait for all that is queued on another one now."""
        return

    @abstractmethod
    def exchanging(self) -> AbstractContextManager[object]:
        """Inside, the current stream is the one on which this rank's exchanges run."""

    @abstractmethod
    def keep(self, tensor: Tensor) -> None:
        """Keep memory until the current stream has used it, whichever stream it is from."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the current stream records a CUDA graph and runs nothing."""

    @abstractmethod
    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory (numel,) for copies that are queued, which no queued copy still uses."""

    @abstractmethod
    def give_back(self, host: Tensor, event: Event) -> None:
        """Let `pinned` use memory again, once the event is over."""

    def fetch(self, values: Tensor, check: Callable[[], None] = lambda: None) -> Deferred:
        """Start to copy numbers to the host, behind what is queued on the current stream."""
        host = self.pinned(values.numel(), values.dtype)
        host.copy_(values.detach().reshape(-1), non_blocking=True)
        return Deferred(host, self.record(), check=check, give_back=self.give_back)

    def send(self, values: Tensor, into: Tensor) -> None:
        """Copy numbers of the host into memory of the device, in order with the current stream.

        ``values`` may be changed when it returns. The host waits for nothing.
        """
        # In the dtype of the device: torch would convert into memory that is not pinned, and a copy
        # of that may wait for the stream.
        host = self.pinned(values.numel(), into.dtype)
        host.copy_(values.reshape(-1))
        into.copy_(host.view(into.shape), non_blocking=True)
        event = self.record()
        if event is not None:
            self.give_back(host, event)

    def enter_thread(self) -> None:
        """Called once by a thread that will work with this device."""
        return


class HostStreams(Streams):
    """Of the CPU."""

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
        """The values as they are now."""
        return Deferred(values.detach().clone(), check=check)

    def send(self, values: Tensor, into: Tensor) -> None:
        into.copy_(values)


class CudaStreams(Streams):
    """Of one GPU."""

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
        torch.cuda.set_device(self.device)
        # While a script captures a CUDA graph, other threads may make no call that could be unsafe
        # in a capture, such as to ask for an event: the capture would fail. This thread never
        # takes part in one, and says so.
        with suppress(OSError, AttributeError):  # a torch that is built for other devices
            driver = ctypes.CDLL("libcuda.so.1")
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def streams_of(device: torch.device) -> Streams:
    """The streams of a device. Makes none before they are used."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


# Events and pinned memory live as long as the process, and are used again.
#
# To destroy one is a CUDA call. A process that was forked, such as a worker of a DataLoader, must
# make none, and it does where its garbage collector meets an object of the parent that holds one:
# torch then ends the worker (`CUDA error: initialization error`). What holds them gives them back
# here when it is freed, which is a call of Python only. It also saves to make them in each step.

_Event = torch.cuda.Event
_free_events: defaultdict[torch.device, deque[_Event]] = defaultdict(deque)


class _PooledEvent:
    """An event of a GPU that is used again when this object is freed."""

    __slots__ = ("_event", "_free")

    def __init__(self, device: torch.device) -> None:
        self._free = _free_events[device]
        try:
            self._event = self._free.popleft()
        except IndexError:
            self._event = _Event()

    def record(self, stream: torch.cuda.Stream) -> None:
        # Streams that were told to wait for an earlier use of the event wait for the position that
        # it had then: recording it again changes nothing for them.
        self._event.record(stream)

    def wait(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)

    def query(self) -> bool:
        return bool(self._event.query())

    def __del__(self) -> None:
        self._free.append(self._event)


class MemoryPool:
    """Host memory that queued copies use, each piece with the event after its last copy."""

    def __init__(self, allocate: Callable[[int, torch.dtype], Tensor]) -> None:
        self._allocate = allocate
        self._free: defaultdict[tuple[int, torch.dtype], deque[tuple[Tensor, Event]]]
        self._free = defaultdict(deque)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory (numel,) that no queued copy uses any more."""
        free = self._free[numel, dtype]
        for _ in range(len(free)):
            try:
                host, event = free.popleft()
            except IndexError:  # another thread has taken it
                break
            if event.query():
                return host
            free.append((host, event))
        with torch.inference_mode(False):  # it is used again in other modes
            return self._allocate(numel, dtype)

    def give_back(self, host: Tensor, event: Event) -> None:
        """Use this memory again when the event is over."""
        self._free[host.numel(), host.dtype].append((host, event))


_memory = MemoryPool(
    lambda numel, dtype: torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
)
