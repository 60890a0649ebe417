"""Process groups of torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors.

The groups are made from a store, without torch's default group: ranks may be processes or threads
of one process, and a default group of the script is not touched.

NCCL refuses two ranks on one GPU, unless it was prepared for that (see `may_share_gpus`). If ranks
share a GPU, CUDA tensors are sent over gloo, through pinned host memory.

Operations of NCCL are queued: a method returns when its work is on the current stream, and
`TimeLimit.on_queued` gets the work and enforces the limit. Without such a callback the method polls
until the GPU has completed the work. NCCL's own watchdog is not used: it ends the process with
SIGABRT some time after a limit, so that a script could neither report the error nor save anything.
A kernel that waits for a lost peer occupies the GPU until it is aborted.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
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
from torchmn.base.warn import warn
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
_NO_LIMIT = timedelta(days=30)  # NCCL's own limit must never be reached before ours
_CLOSE_S = 60.0
_ABORT_S = 10.0
_OF_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
_making_nccl = threading.Lock()
_CAN_BE_LAZY = "lazy_init" in (dist.ProcessGroupGloo.create_device.__doc__ or "")
"""False for torch 2.6 and 2.7, whose gloo connects all pairs of ranks at once."""
_LATE = ("timed out", "timeout", "time out")
_LOST = (
    *("connection closed", "connection reset", "connection refused", "connection abort"),
    *("broken pipe", "socket closed", "unexpectedly closed", "likely closed", "peer closed"),
    *("not connected", "unreachable", "no route to host", "network is down", "host is down"),
    *("network error", "remote process"),  # of NCCL
)
"""What gloo, its sockets, the store and NCCL say of a peer that is gone."""


class TorchDistributedTransport(Transport):
    """A gloo process group and, for a GPU, an NCCL process group, over one store. *Collective.*

    ``store`` must be reachable by all ranks, and nothing else may use it under the same prefix.
    ``cuda_device`` is this rank's GPU or None. With ``supports_nccl=False``, for ranks that share a
    GPU, CUDA tensors are sent over gloo.
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
        # Shared with all groups that are split from this one.
        self._has_failed = has_failed or threading.Event()
        self._staging: Staging | None = None
        if cuda_device is not None and self.supports_nccl:
            self._nccl = _nccl(PrefixStore("nccl", store), rank, size)
            self.is_close_collective = True  # NCCL waits for the other ranks of this node
            if size > 1:
                # NCCL connects all ranks in the first call, so all must take part in it: a message
                # between two ranks as the first call would hang.
                token = torch.zeros(1, dtype=torch.int32, device=cuda_device)
                self.all_reduce_(token, "sum", TimeLimit(timeout_s))
        _register_exit_cleanup().add(self)

    @property
    def has_nccl(self) -> bool:
        """Whether CUDA tensors are sent over NCCL. Local."""
        return self._nccl is not None

    def use_gpu(self, device: torch.device, *, may_use_nccl: bool) -> None:
        """Set the GPU of this rank. Transports split from this one use NCCL if they may. Local.

        This transport itself sends CUDA tensors over gloo, unless it was made with NCCL.
        """
        self.cuda_device = device
        self.supports_nccl = self.supports_nccl and may_use_nccl

    def _is_staged(self, tensor: Tensor) -> bool:
        """Whether a tensor is sent through host memory. Raises UnsupportedError if it cannot be."""
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
        options.timeout = _left(limit)  # for gloo's own thread, which `close` waits for
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
        """Queue an operation of NCCL on the current stream.

        A lock is held while it starts: several threads may send messages, as modules of a chain do,
        and coalescing is a state of the process group.
        """
        is_watched = limit.on_queued is not None
        try:
            with self._nccl_turn:
                started = start(self._nccl)
            if started is None:
                return
            started.wait()  # makes the current stream wait, not the host
            work = _NcclWork(started, what)
            if limit.on_queued is not None:
                limit.on_queued(work)
            elif not poll_until(work.is_done, limit, _POLLS_BEFORE_YIELD):
                raise TimeLimitError(f"{what} did not complete within {limit.seconds:g} s.")
        except (RuntimeError, CommunicationError) as error:
            # A watched operation is aborted by its `Group`, which first stops handing out results.
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
        if part.size > 1:
            # A rank that exits after the split would break connections that others still make.
            part.barrier(limit)
        return part

    def close(self) -> None:
        nccl, self._nccl = self._nccl, None
        self._gloo = None  # a gloo group closes its sockets when it is destroyed
        if nccl is None:
            return
        if not self._has_failed.is_set():
            limit_s = min(self._timeout_s, _CLOSE_S)
            if _run_within(limit_s, nccl.shutdown):  # waits for the other ranks of this node
                return
            warn(
                f"Another rank of this node has not closed its NCCL communicator within "
                f"{limit_s:g} s: this one is aborted. Call comm.finalize() on all ranks.",
            )
        _run_within(_ABORT_S, nccl.abort)

    def abandon(self) -> None:
        """Close at the exit of the process; does not wait for other ranks after an error. Local."""
        # Set by Python for an uncaught exception: the other ranks may be stuck in a collective.
        if getattr(sys, "last_value", None) is not None:
            self._has_failed.set()
        self.close()


Start = Callable[[Any], Any]
"""A function that starts an operation on a process group and returns its Work."""


class _NcclWork:
    """A queued operation of NCCL, as a `QueuedWork`."""

    def __init__(self, work: Any, what: str) -> None:
        self._work = work
        self.what = what

    def is_done(self) -> bool:
        try:
            if not self._work.is_completed():
                return False
            self._work.wait()  # does not block any more; raises the error of the operation
        except RuntimeError as error:
            raise _translate(error, self.what, math.inf) from error
        return True


def _nccl(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    set_timeout(options, _NO_LIMIT)
    # The lock: ranks may be threads, and the environment belongs to the process.
    with _making_nccl, _errors_left_to_us():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """Context for making NCCL groups that do not end the process and whose `wait` does not block.

    torch reads the environment variables when it makes a group.
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
    """Start all messages as one operation of NCCL. Separate ones could wait for each other."""
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
    """Call a function that may block without a limit; returns whether it ended in time."""
    # A daemon thread, so that a call that never returns does not keep the process from exiting.
    ending = threading.Thread(target=_ignoring_errors, args=(end,), daemon=True)
    ending.start()
    ending.join(limit_s)
    return not ending.is_alive()


def _ignoring_errors(end: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the group was aborted before
        end()


@cache
def _register_exit_cleanup() -> weakref.WeakSet[TorchDistributedTransport]:
    """The open transports, which are closed when the interpreter exits. Registered once.

    gloo's threads end the process with SIGABRT if groups still exist when Python finalizes: in one
    exit out of ten with 4 ranks.
    """
    transports: weakref.WeakSet[TorchDistributedTransport] = weakref.WeakSet()

    def close_all() -> None:
        for transport in list(transports):
            transport.abandon()

    atexit.register(close_all)
    return transports


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, own_address: str | None) -> Any:
    """Make a gloo group that listens on ``own_address``. *Collective.*

    Without an address gloo uses GLOO_SOCKET_IFNAME or the address of the host name. Large groups
    connect two ranks when they first exchange a message (torch 2.8 and later). Small groups connect
    all ranks now, so that a rank that cannot be reached is found here.
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
    """A tag that depends on the size of the message, so that sizes of matching messages agree.

    gloo ends the process if they do not. With different tags, ranks in different collectives wait
    until their time limit instead.
    """
    return (tag << 16 | zlib.crc32(str(tensor.nbytes).encode()) & 0xFFFF) & 0x7FFFFFFF


def _left(limit: TimeLimit) -> timedelta:
    return timedelta(seconds=max(limit.left_s, 0.001))


def _bytes(tensor: Tensor) -> Tensor:
    """A uint8 view of a tensor, so that every dtype can be sent."""
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def _translate(error: Exception, what: str, seconds: float) -> CommunicationError:
    """Translate an error of gloo or NCCL, which have no classes of errors, by its message."""
    # NCCL's own message and its last error are on further lines, where a lost peer may be named.
    text = " ".join(str(error).split()) or type(error).__name__
    lowered = text.lower()
    if any(word in lowered for word in _LOST):
        return PeerLostError(f"{what}: a peer closed its connection ({text}).")
    if any(word in lowered for word in _LATE):
        return TimeLimitError(f"{what} did not complete within {seconds:g} s ({text}).")
    return CommunicationError(f"{what} failed: {text.removesuffix('.')}.")
