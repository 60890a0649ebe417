"""A device whose work runs late and out of step, on a CPU: what a GPU may do at worst.

Inside of `FakeDevice.running` each operation on a tensor of the device is queued on the current
stream, and runs in another thread after `begin`: when the host has queued all that it could.
Streams run in an order that is given: the exchange's as late as possible, or the caller's. Reading
a number on the host raises `HostWaits`, but for `tolist`, which cannot be seen here. Memory that is
freed is overwritten by the stream that it is from, in its order, as a caching allocator may do at
once.

So whoever leaves a wait out reads NaN, or too old or too new numbers, each time.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.limits import limit
from torchmn.comm.streams import Event, MemoryPool, Streams
from torchmn.comm.transports.base import TimeLimit, Transport
from torchmn.errors import PeerLostError

Order = Literal["caller first", "exchange first"]
_aten = torch.ops.aten
_NEEDS_NUMBERS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default}


class HostWaits(Exception):
    """The host has asked for a number that the device has not computed."""


class FakeEvent:
    """A position in a stream."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def pass_(self) -> bool:
        self.is_over = True
        return True


class _Memory:
    """Memory of the device, which lives until its stream has overwritten it."""

    def __init__(self, raw: np.ndarray, stream: str) -> None:
        self.raw, self.stream = raw, stream
        self.users: set[str] = set()


class FakeDevice:
    """Queues and memory. One executor thread runs what is queued."""

    def __init__(self, order: Order = "caller first") -> None:
        self._is_exchange_first = order == "exchange first"
        self._lock = threading.RLock()
        self._queues: defaultdict[str, deque[Callable[[], bool]]] = defaultdict(deque)
        self._memory: dict[int, _Memory] = {}
        self._local = threading.local()
        self._has_begun = threading.Event()
        self._is_closed = False
        self.is_aborted = False
        self.num_done = 0
        """The operations that were run so far: a clock that no other process disturbs."""
        self._thread = threading.Thread(target=self._execute, name="fake device", daemon=True)
        self._thread.start()

    # ---- queues ----

    @property
    def current(self) -> str:
        return getattr(self._local, "stream", "caller")

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """The current stream of this thread."""
        before, self._local.stream = self.current, stream
        try:
            with self.running():
                yield
        finally:
            self._local.stream = before

    @contextmanager
    def running(self) -> Iterator[None]:
        """Operations of this thread on tensors of the device are queued."""
        if getattr(self._local, "is_running", False):
            yield
            return
        self._local.is_running = True
        try:
            with _Queueing(self):
                yield
        finally:
            self._local.is_running = False

    def queue(self, operation: Callable[[], bool], stream: str | None = None) -> None:
        """Run this after what is on the stream; again, until it returns True."""
        with self._lock:
            self._queues[stream or self.current].append(operation)

    def begin(self) -> None:
        """Begin to run what was queued, and go on with what will be."""
        self._has_begun.set()

    def pause(self) -> None:
        """Run nothing until `begin`."""
        self._has_begun.clear()

    def synchronize(self) -> None:
        """Return when everything was done."""
        self.begin()
        while any(self._queues.values()):
            time.sleep(0.001)

    def close(self) -> None:
        self.synchronize()
        self._is_closed = True
        self._thread.join()

    def _execute(self) -> None:
        while not self._is_closed:
            self._has_begun.wait()
            if not self._execute_one():
                time.sleep(0.001)

    def _execute_one(self) -> bool:
        """Run one operation of the first stream that has one which can run."""
        with self._lock:
            names = sorted(self._queues, key=lambda name: name == "exchange")
        for name in reversed(names) if self._is_exchange_first else names:
            queue = self._queues[name]
            if queue and queue[0]():
                queue.popleft()
                self.num_done += 1
                return True
        return False

    # ---- memory ----

    def tensor(self, values: Tensor) -> Tensor:
        """A tensor of the device with these values, queued on the current stream."""
        made = self._new(values.shape, values.stride(), values.dtype)
        shadow, copy = self._shadow(made), values.clone()
        self.queue(lambda: shadow.copy_(copy) is not None)
        return made

    def adopt(self, values: Tensor) -> Tensor:
        """A tensor of the device with these values, there at once."""
        made = self._new(values.shape, values.stride(), values.dtype)
        self._shadow(made).copy_(values)
        return made

    def owns(self, tensor: Tensor) -> bool:
        return self._address_of(tensor) is not None

    def _address_of(self, tensor: Tensor) -> int | None:
        """Where the memory begins in which a tensor lies, if that is the device's."""
        place = tensor.data_ptr()
        with self._lock:
            for address, memory in self._memory.items():
                if address <= place < address + memory.raw.nbytes:
                    return address
        return None

    def keep(self, tensor: Tensor) -> None:
        """As `Tensor.record_stream`."""
        address = self._address_of(tensor)
        if address is not None:
            self._memory[address].users.add(self.current)

    def _new(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numel = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        raw = np.full(max(1, numel) * dtype.itemsize, 0xFF, np.uint8)
        view = raw[:]  # as long as a tensor has it the memory is in use
        address = raw.ctypes.data
        with self._lock:
            self._memory[address] = _Memory(raw, self.current)
        weakref.finalize(view, self._free, address)
        return torch.from_numpy(view).view(dtype).as_strided(shape, stride)

    def _free(self, address: int) -> None:
        memory = self._memory[address]
        for user in memory.users - {memory.stream}:
            passed = FakeEvent()
            self.queue(passed.pass_, user)
            self.queue(passed.query, memory.stream)

        def overwrite() -> bool:
            memory.raw.fill(0xFF)
            with self._lock:
                self._memory.pop(address, None)
            return True

        self.queue(overwrite, memory.stream)

    def _shadow(self, tensor: Tensor) -> Tensor:
        """The same memory, which a queued operation uses without keeping it."""
        address = self._address_of(tensor)
        assert address is not None
        whole = torch.from_numpy(self._memory[address].raw).view(tensor.dtype)
        first = (tensor.data_ptr() - address) // tensor.itemsize
        return whole.as_strided(tensor.shape, tensor.stride(), first)

    # ---- operations ----

    def dispatch(self, function, args, kwargs):
        flat, spec = tree_flatten((args, kwargs))
        if not any(isinstance(x, Tensor) and self.owns(x) for x in flat):
            return function(*args, **kwargs)
        if function in _NEEDS_NUMBERS:
            raise HostWaits(str(function))
        schema = function._schema
        aliases = [each.alias_info for each in schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases):
            return function(*args, **kwargs)  # a view
        if schema.name in ("aten::set_", "aten::is_pinned"):
            return function(*args, **kwargs)  # of the host: which memory a tensor has
        shadows = [self._shadow(x) if isinstance(x, Tensor) and self.owns(x) else x for x in flat]
        late_args, late_kwargs = tree_unflatten(shadows, spec)
        if schema.is_mutable:
            if function is _aten.copy_.default and not self.owns(args[0]):
                is_queued = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
                if not is_queued:
                    raise HostWaits("a copy to the host that is not non_blocking")
            self.queue(lambda: _ran(function, late_args, late_kwargs))
            given = {
                argument.name: args[i] if i < len(args) else kwargs.get(argument.name)
                for i, argument in enumerate(schema.arguments)
            }
            written = [
                given[argument.name]
                for argument in schema.arguments
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            return written[0] if schema.returns else None
        sample, sample_spec = tree_flatten(function(*args, **kwargs))  # shapes only
        made = [self._new(x.shape, x.stride(), x.dtype) for x in sample]
        targets = [self._shadow(x) for x in made]

        def compute() -> bool:
            results, _ = tree_flatten(function(*late_args, **late_kwargs))
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)
            return True

        self.queue(compute)
        return tree_unflatten(made, sample_spec)


def _ran(function, args, kwargs) -> bool:
    with torch.no_grad():
        function(*args, **kwargs)
    return True


class _Queueing(TorchDispatchMode):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._device.dispatch(func, args, kwargs or {})


class FakeStreams(Streams):
    """The `Streams` of a `FakeDevice`."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.is_in_capture = False
        self._pool = MemoryPool(
            lambda numel, dtype: torch.full((numel,), float("nan")).to(dtype).clone()
        )

    def record(self) -> FakeEvent:
        event = FakeEvent()
        self.device.queue(event.pass_)
        return event

    def current(self) -> str:
        return self.device.current

    def wait_for(self, stream: object) -> None:
        passed = FakeEvent()
        self.device.queue(passed.pass_, str(stream))
        self.wait(passed)

    def wait(self, event: Event | None) -> None:
        if event is not None:
            self.device.queue(event.query)

    def exchanging(self):
        return self.device.on("exchange")

    def keep(self, tensor: Tensor) -> None:
        self.device.keep(tensor)

    def is_capturing(self) -> bool:
        return self.is_in_capture

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._pool.take(numel, dtype)

    def give_back(self, host: Tensor, event: Event) -> None:
        self._pool.give_back(host, event)


class Meeting:
    """Where the sums of all ranks meet. Shared by them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._arrived: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
        self._done: set[int] = set()

    def sum_(self, number: int, rank: int, tensor: Tensor) -> bool:
        """Arrive with a tensor at a sum; whether all have arrived, so that it is the sum."""
        with self._lock:
            arrived = self._arrived[number]
            arrived[rank] = tensor
            if len(arrived) == self.size and number not in self._done:
                total = torch.stack([arrived[each] for each in range(self.size)]).sum(0)
                for each in arrived.values():
                    each.copy_(total)
                self._done.add(number)
            return number in self._done


class FakeNccl(Transport):
    """Sums of tensors of a `FakeDevice`, queued as by NCCL."""

    name = "fake nccl"

    def __init__(self, meeting: Meeting, rank: int, streams: FakeStreams) -> None:
        super().__init__(rank, meeting.size)
        self._meeting, self._streams = meeting, streams
        self._number = 0
        self.is_lost = False
        self.may_fail = threading.Event()
        self.may_fail.set()

    def all_reduce_(self, buffer, op, limit: TimeLimit) -> None:
        device, meeting, number = self._streams.device, self._meeting, self._number
        self._number += 1
        shadow = device._shadow(buffer)
        device.queue(lambda: device.is_aborted or meeting.sum_(number, self.rank, shadow))
        work = _FakeWork(self, self._streams.record())
        assert limit.on_queued is not None
        limit.on_queued(work)

    def abort(self) -> None:
        """The device goes on, and the error is known some time later."""
        self._streams.device.is_aborted = True
        time.sleep(0.1)
        self.may_fail.wait(limit(20))

    def exchange(self, sends, recvs, limit, tag=0) -> None:
        raise NotImplementedError

    def split(self, ranks, key, limit):
        raise NotImplementedError

    def close(self) -> None:
        return


class _FakeWork:
    what = "the sum"

    def __init__(self, transport: FakeNccl, event: FakeEvent) -> None:
        self._transport, self._event = transport, event

    def is_done(self) -> bool:
        if self._transport.is_lost:
            raise PeerLostError("the sum failed: a peer is gone.")
        return self._event.query()
