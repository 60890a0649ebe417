"""torch.distributed process groups: gloo for CPU tensors, NCCL for CUDA tensors.

The groups are made from a store, without the default group: ranks may be processes or threads of
one process, and a default group that the user has made beside us is left alone.
"""

from __future__ import annotations

import atexit
import os
import weakref
import zlib
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from torchmn.errors import PeerLostError, TimeLimitError, TorchmnError, UnsupportedError
from torchmn.transports.base import (
    MAX_DIRECT_RANKS,
    Message,
    ReduceOp,
    Scratch,
    TimeLimit,
    Transport,
)

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
_CAN_BE_LAZY = "lazy_init" in (dist.ProcessGroupGloo.create_device.__doc__ or "")
"""torch 2.6 and 2.7 connect all ranks with each other at once."""
_LATE = ("timed out", "timeout", "time out")
_LOST = ("connection closed", "connection reset", "broken pipe", "connection refused")


class TorchDistributedTransport(Transport):
    """gloo and, where there is a GPU, NCCL, over one store.

    ``store`` must be reachable by all ranks and not be used by anything else under the same prefix.
    ``cuda_device`` is this rank's GPU or None. *Collective.*
    """

    name = "torch.distributed"
    supports_nccl = True

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
        self._nccl: Any = None
        if cuda_device is not None and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
        _register_exit_cleanup().add(self)

    def _group(self, tensor: Tensor) -> Any:
        if not tensor.is_cuda:
            return self._gloo
        if self._nccl is None:
            raise UnsupportedError(
                f"A tensor on {tensor.device} needs NCCL, which this build of torch lacks or "
                "which found no GPU of this rank. Move it to the CPU or use transport='mpi'."
            )
        return self._nccl

    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], limit: TimeLimit, tag: int = 0
    ) -> None:
        tensors = [tensor for _, tensor in (*sends, *recvs) if tensor.numel()]
        if not tensors:
            return
        group = self._group(tensors[0])
        self._count_bytes(sends, recvs)
        coalesce = group is self._nccl
        try:
            if coalesce:
                group._start_coalescing()
            works = [
                group.recv([_bytes(tensor)], peer, _sized_tag(tag, tensor))
                for peer, tensor in recvs
                if tensor.numel()
            ]
            works += [
                group.send([_bytes(tensor)], peer, _sized_tag(tag, tensor))
                for peer, tensor in sends
                if tensor.numel()
            ]
            if coalesce:
                works = [group._end_coalescing()]
            for work in works:
                work.wait(_left(limit))
        except RuntimeError as error:
            raise _translate(error, "an exchange", limit.seconds) from error

    def receive_any(self, buffer: Tensor, limit: TimeLimit, tag: int = 0) -> int:
        try:
            work = self._gloo.recv_anysource([_bytes(buffer)], _sized_tag(tag, buffer))
            work.wait(_left(limit))
        except RuntimeError as error:
            raise _translate(error, "a receive from any rank", limit.seconds) from error
        source = int(work._source_rank())
        self.received[source] += buffer.nbytes
        return source

    def all_reduce_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        native = _NCCL_REDUCES if buffer.is_cuda else _GLOO_REDUCES
        if buffer.dtype not in native:
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
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = _left(limit)
        flat = _bytes(buffer)
        self._wait(lambda group: group.broadcast([flat], options), buffer, "broadcast", limit)

    def _wait(self, start: Any, buffer: Tensor, what: str, limit: TimeLimit) -> None:
        group = self._group(buffer)
        try:
            start(group).wait(_left(limit))
        except RuntimeError as error:
            raise _translate(error, what, limit.seconds) from error

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
        )
        if part.size > 1:  # a rank that exits now would break connections that others still make
            part.barrier(limit)
        return part

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.shutdown()
        self._nccl = self._gloo = None  # a gloo group closes its sockets when it is gone


@cache
def _register_exit_cleanup() -> weakref.WeakSet[TorchDistributedTransport]:
    """The open transports, closed when the interpreter exits. Registered once.

    gloo's threads end the process with SIGABRT if its groups still exist when Python finalizes:
    one exit in ten with 4 ranks.
    """
    transports: weakref.WeakSet[TorchDistributedTransport] = weakref.WeakSet()

    def close_all() -> None:
        for transport in list(transports):
            transport.close()

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
    options = gloo._Options()
    options._timeout = timeout
    if own_address is not None:
        options._devices = [gloo.create_device(hostname=own_address, **lazy)]
    elif interfaces:
        options._devices = [gloo.create_device(interface=i, **lazy) for i in interfaces.split(",")]
    else:
        options._devices = [gloo.create_default_device(**lazy)]
    return gloo(store, rank, size, options)


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


def _translate(error: Exception, what: str, seconds: float) -> TorchmnError:
    """The torchmn error for an error of gloo or NCCL."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    lowered = text.lower()
    if any(word in lowered for word in _LOST):
        return PeerLostError(f"{what}: a peer closed its connection ({text}).")
    if any(word in lowered for word in _LATE):
        return TimeLimitError(f"{what} did not complete within {seconds:g} s ({text}).")
    return PeerLostError(f"{what} failed: {text}.")
