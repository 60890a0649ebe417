"""torch.distributed process groups: gloo for CPU tensors, NCCL for CUDA tensors.

The groups are made from a store, without the default group: ranks may be processes or threads of
one process, and a default group that the user has made beside us is left alone.

NCCL refuses two ranks on one GPU, unless it was prepared for that (see `may_share_gpus`). Where
ranks share one, CUDA tensors go over gloo, through pinned host memory.

What goes to NCCL is queued: a method returns when its work is on the current stream, and whoever
gave the `TimeLimit` looks at the work (`TimeLimit.on_queued`); without such a one the method looks
itself until the GPU has done it. NCCL's own watchdog is not used: it ends the process by SIGABRT
some time after a limit, and a script could neither report that nor save anything. A kernel that
waits for a lost peer occupies the GPU until it is aborted.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchmn.base.errors import CommunicationError, PeerLostError, TimeLimitError, UnsupportedError
from torchmn.base.torch_private import (
    PrefixStore,
    end_coalescing,
    gloo_options,
    set_timeout,
    source_rank,
    start_coalescing,
)
from torchmn.comm.transports.base import (
    MAX_DIRECT_RANKS,
    Message,
    ReduceOp,
    Scratch,
    TimeLimit,
    Transport,
    poll_until,
)
from torchmn.comm.transports.staging import Staging

_GLOO_REDUCES = {
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}
_NCCL_REDUCES = {*_GLOO_REDUCES, torch.float16, torch.bfloat16}
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_POLLS_BEFORE_YIELD = 200
_NO_LIMIT = timedelta(days=30)  # of NCCL's own: ours come first
_CLOSE_S = 60.0
_ABORT_S = 10.0
_OF_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
_making_nccl = threading.Lock()
_CAN_BE_LAZY = "lazy_init" in (dist.ProcessGroupGloo.create_device.__doc__ or "")
"""torch 2.6 and 2.7 connect all ranks with each other at once."""
_LATE = ("timed out", "timeout", "time out")
_LOST = ("connection closed", "connection reset", "broken pipe", "connection refused")


class TorchDistributedTransport(Transport):
    """gloo and, where there is a GPU, NCCL, over one store.

    ``store`` must be reachable by all ranks and not be used by anything else under the same prefix.
    ``cuda_device`` is this rank's GPU or None. ``supports_nccl=False``: ranks share GPUs, and CUDA
    tensors go over gloo. *Collective.*
    """

    name = "torch.distributed"

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        cuda_device: torch.device | None = None,
        is_trusted: bool = False,
        scratch: Scratch | None = None,
        own_address: str | None = None,
        supports_nccl: bool = True,
        has_failed: threading.Event | None = None,
    ) -> None:
        super().__init__(rank, size, scratch)
        self.own_address = own_address
        self.is_trusted = is_trusted
        self._store = store
        self._timeout_s = timeout_s
        self.cuda_device = cuda_device
        timeout = timedelta(seconds=timeout_s)
        try:
            self._gloo: Any = _gloo(PrefixStore("gloo", store), rank, size, timeout, own_address)
        except (RuntimeError, ValueError) as error:
            raise _translate(error, f"joining a world of {size}", timeout_s) from error
        self.supports_nccl = supports_nccl and dist.is_nccl_available()
        self._nccl: Any = None
        self._nccl_turn = threading.Lock()
        self._has_failed = has_failed or threading.Event()  # this group or one it was split from
        self._staging: Staging | None = None
        if cuda_device is not None and self.supports_nccl:
            self._nccl = _nccl(PrefixStore("nccl", store), rank, size)
            self.is_close_collective = True  # NCCL waits for the ranks of this node
            if size > 1:
                # NCCL connects in the first call, of all ranks: a message between two would hang.
                token = torch.zeros(1, dtype=torch.int32, device=cuda_device)
                self.all_reduce_(token, "sum", TimeLimit(timeout_s))
        _register_exit_cleanup().add(self)

    @property
    def has_nccl(self) -> bool:
        """Whether CUDA tensors go over NCCL. Local."""
        return self._nccl is not None

    def use_gpu(self, device: torch.device, *, may_use_nccl: bool) -> None:
        """Send tensors of this GPU from now on: what is split from this one by NCCL, if it may.

        This one by gloo, through host memory, unless it was made with NCCL. Local.
        """
        self.cuda_device = device
        self.supports_nccl = self.supports_nccl and may_use_nccl

    def _is_staged(self, tensor: Tensor) -> bool:
        """Whether a tensor goes through host memory. Raises UnsupportedError: it cannot be sent."""
        if not tensor.is_cuda or self._nccl is not None:
            return False
        if self.cuda_device is None:
            raise UnsupportedError(
                f"A tensor on {tensor.device}, but this rank was given no GPU to exchange from: "
                "torchmn run --backend gloo means CPUs, and another communicator may have been "
                "made before. Move it to the CPU, or start the job with --backend nccl or mpi."
            )
        return True

    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], limit: TimeLimit, tag: int = 0
    ) -> None:
        tensors = [tensor for _, tensor in (*sends, *recvs) if tensor.numel()]
        if not tensors:
            return
        if self._is_staged(tensors[0]):
            if self._staging is None:
                self._staging = Staging()
            self._staging.exchange(
                sends, recvs, limit, lambda out, into: self.exchange(out, into, limit, tag)
            )
            return
        self._count_bytes(sends, recvs)
        if tensors[0].is_cuda:
            self._on_nccl(lambda group: _batch(group, sends, recvs, tag), "an exchange", limit)
            return
        try:
            for work in _start_all(self._gloo, sends, recvs, tag):
                work.wait(_left(limit))
        except RuntimeError as error:
            raise _translate(error, "an exchange", limit.seconds) from error

    def receive_any(self, buffer: Tensor, limit: TimeLimit, tag: int = 0) -> int:
        try:
            work = self._gloo.recv_anysource([_bytes(buffer)], _sized_tag(tag, buffer))
            work.wait(_left(limit))
        except RuntimeError as error:
            raise _translate(error, "a receive from any rank", limit.seconds) from error
        source = source_rank(work)
        self.received[source] += buffer.nbytes
        return source

    def queues(self, buffer: Tensor) -> bool:
        return buffer.is_cuda and buffer.dtype in _NCCL_REDUCES and self._nccl is not None

    def all_reduce_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        native = _NCCL_REDUCES if buffer.is_cuda else _GLOO_REDUCES
        if buffer.dtype not in native or self._is_staged(buffer):
            super().all_reduce_(buffer, op, limit)
            return
        self._count_ring(buffer.nbytes)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_OPS[op])
        options.timeout = _left(limit)  # of gloo's own thread, which `close` waits for
        self._wait(lambda group: group.allreduce([buffer], options), buffer, "all_reduce", limit)

    def broadcast_(self, buffer: Tensor, root: int, limit: TimeLimit) -> None:
        if buffer.numel() == 0:
            return
        if self._is_staged(buffer):
            super().broadcast_(buffer, root, limit)
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = _left(limit)
        flat = _bytes(buffer)
        self._wait(lambda group: group.broadcast([flat], options), buffer, "broadcast", limit)

    def _wait(self, start: Start, buffer: Tensor, what: str, limit: TimeLimit) -> None:
        if buffer.is_cuda:
            self._on_nccl(start, what, limit)
            return
        try:
            start(self._gloo).wait(_left(limit))
        except RuntimeError as error:
            raise _translate(error, what, limit.seconds) from error

    def _on_nccl(self, start: Start, what: str, limit: TimeLimit) -> None:
        """Queue something of NCCL on the current stream.

        Threads take turns to start: of a chain of modules each has messages of its own, and a group
        of messages is a state of the process group.
        """
        is_watched = limit.on_queued is not None
        try:
            with self._nccl_turn:
                started = start(self._nccl)
            if started is None:
                return
            started.wait()  # the current stream waits for it; the host does not
            work = _NcclWork(started, what)
            if limit.on_queued is not None:
                limit.on_queued(work)
            elif not poll_until(work.is_done, limit, _POLLS_BEFORE_YIELD):
                raise TimeLimitError(f"{what} did not complete within {limit.seconds:g} s.")
        except (RuntimeError, CommunicationError) as error:
            if not is_watched:
                self.abort()
            if isinstance(error, CommunicationError):
                raise
            raise _translate(error, what, limit.seconds) from error

    def abort(self) -> None:
        self._has_failed.set()
        if self._nccl is not None:
            _run_within(_ABORT_S, self._nccl.abort)

    def split(self, ranks: Sequence[int], key: str, limit: TimeLimit) -> Transport:
        part = TorchDistributedTransport(
            PrefixStore(key, self._store),
            list(ranks).index(self.rank),
            len(ranks),
            timeout_s=limit.seconds,
            cuda_device=self.cuda_device,
            is_trusted=self.is_trusted,
            scratch=self.scratch,
            own_address=self.own_address,
            supports_nccl=self.supports_nccl,
            has_failed=self._has_failed,
        )
        if part.size > 1:  # a rank that exits now would break connections that others still make
            part.barrier(limit)
        return part

    def close(self) -> None:
        nccl, self._nccl = self._nccl, None
        self._gloo = None  # a gloo group closes its sockets when it is gone
        if nccl is None:
            return
        if not self._has_failed.is_set():
            limit_s = min(self._timeout_s, _CLOSE_S)
            if _run_within(limit_s, nccl.shutdown):  # it waits for the other ranks of this node
                return
            warnings.warn(
                f"Another rank of this node has not closed its NCCL communicator within "
                f"{limit_s:g} s: this one is aborted. Call comm.finalize() on all ranks.",
                RuntimeWarning,
                stacklevel=2,
            )
        _run_within(_ABORT_S, nccl.abort)

    def abandon(self) -> None:
        """Close at the exit of the process, without the other ranks if it has failed. Local."""
        if getattr(sys, "last_value", None) is not None:
            self._has_failed.set()
        self.close()


Start = Callable[[Any], Any]
"""Starts something on a process group and returns its work."""


class _NcclWork:
    """Something of NCCL that a GPU will do: a `QueuedWork`."""

    def __init__(self, work: Any, what: str) -> None:
        self._work = work
        self.what = what

    def is_done(self) -> bool:
        try:
            if not self._work.is_completed():
                return False
            self._work.wait()  # it has ended: this raises its error
        except RuntimeError as error:
            raise _translate(error, self.what, math.inf) from error
        return True


def _nccl(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    set_timeout(options, _NO_LIMIT)
    with _making_nccl, _errors_left_to_us():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """NCCL groups made inside do not end the process, and `wait` does not wait on the host.

    torch reads these variables when it makes a group.
    """
    before = {name: os.environ.get(name) for name in _OF_NCCL}
    os.environ.update(_OF_NCCL)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _batch(group: Any, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> Any:
    """All messages as one operation of NCCL, which may otherwise wait for one another."""
    start_coalescing(group)
    _start_all(group, sends, recvs, tag)
    return end_coalescing(group)


def _start_all(
    group: Any, sends: Sequence[Message], recvs: Sequence[Message], tag: int
) -> list[Any]:
    return [
        start([_bytes(tensor)], peer, _sized_tag(tag, tensor))
        for start, messages in ((group.recv, recvs), (group.send, sends))
        for peer, tensor in messages
        if tensor.numel()
    ]


def _run_within(limit_s: float, end: Callable[[], object]) -> bool:
    """Call what has no time limit of its own, and may wait for a GPU; whether it has returned."""
    ending = threading.Thread(target=_ignoring_errors, args=(end,), daemon=True)
    ending.start()
    ending.join(limit_s)
    return not ending.is_alive()


def _ignoring_errors(end: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # it was aborted before
        end()


@cache
def _register_exit_cleanup() -> weakref.WeakSet[TorchDistributedTransport]:
    """The open transports, closed when the interpreter exits. Registered once.

    gloo's threads end the process with SIGABRT if its groups still exist when Python finalizes:
    one exit in ten with 4 ranks.
    """
    transports: weakref.WeakSet[TorchDistributedTransport] = weakref.WeakSet()

    def close_all() -> None:
        for transport in list(transports):
            transport.abandon()

    atexit.register(close_all)
    return transports


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, own_address: str | None) -> Any:
    """gloo listens on ``own_address``; without one on GLOO_SOCKET_IFNAME or by the host's name.

    Many ranks are connected with those that they exchange with, when they do; few ranks with all
    others now, so that one that cannot be reached is found here.
    """
    is_lazy = size > MAX_DIRECT_RANKS and _CAN_BE_LAZY
    if own_address is None and not is_lazy:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo: Any = dist.ProcessGroupGloo
    lazy = {"lazy_init": True} if is_lazy else {}
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if own_address is not None:
        devices = [gloo.create_device(hostname=own_address, **lazy)]
    elif interfaces:
        devices = [gloo.create_device(interface=i, **lazy) for i in interfaces.split(",")]
    else:
        devices = [gloo.create_default_device(**lazy)]
    return gloo(store, rank, size, gloo_options(timeout, devices))


def _sized_tag(tag: int, tensor: Tensor) -> int:
    """A tag that includes the size: gloo ends the process when sizes do not match.

    Ranks in different collectives then wait until their time limit.
    """
    return (tag << 16 | zlib.crc32(str(tensor.nbytes).encode()) & 0xFFFF) & 0x7FFFFFFF


def _left(limit: TimeLimit) -> timedelta:
    return timedelta(seconds=max(limit.left_s, 0.001))


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes, so that every dtype can be sent."""
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def _translate(error: Exception, what: str, seconds: float) -> CommunicationError:
    """The torchmn error for an error of gloo or NCCL."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    lowered = text.lower()
    if any(word in lowered for word in _LOST):
        return PeerLostError(f"{what}: a peer closed its connection ({text}).")
    if any(word in lowered for word in _LATE):
        return TimeLimitError(f"{what} did not complete within {seconds:g} s ({text}).")
    return PeerLostError(f"{what} failed: {text}.")
