"""Shared memory between the ranks of one node, for CPU tensors.

A wrapper around another transport: messages still travel by that one, collectives through a
segment that all ranks of the node have mapped. The segment has no name (see `node_memory`), so
nothing is left after a kill -9.

All-reduce works in chunks that stay in the cache. Each rank has two slots of one chunk, used in
turn, and two counters:

    1. copy the stripes that others own into the own slot       arrived[r] = k
    2. when all arrived: fold the own stripe over all slots,
       into the own buffer and into the own slot                folded[r] = k
    3. when all folded: copy the others' stripes out of their slots

Before a slot is written again (chunk k+2) all ranks have arrived at chunk k+1 and so have left
chunk k: two waits a chunk are enough.

Measured on two cores, sum over 2 ranks, 1 MB: 0.5 MB copied in 13 us, folded in 15 us, copied out
in 13 us; MPI_Allreduce needs 109 us for all of it.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from torchmn.communicators.transports.base import (
    Message,
    ReduceOp,
    TimeLimit,
    Transport,
    fold,
)
from torchmn.communicators.transports.node_memory import Address, NodeMemory, Purpose
from torchmn.errors import TimeLimitError, TorchmnError, UnsupportedError
from torchmn.units import KiB, MiB

CHUNK_BYTES = 2 * MiB
_SEGMENT_BYTES = 128 * MiB  # on nodes with many ranks chunks get smaller
_SMALL_BYTES = 32 * KiB
_LINE_BYTES = 128  # counters of different ranks on different cache lines
_POLLS_BEFORE_YIELD = 300
_EAGER_S = 0.01
_POLL_S = 0.00002
_ARRIVED, _FOLDED, _NUM_COUNTERS = 0, 1, 2
_PURPOSE = Purpose(
    "the exchange between this node's ranks",
    "Make the folder larger (docker: --shm-size).",
)


class SharedMemoryTransport(Transport):
    """Collectives of one node through shared memory, everything else by ``inner``. *Collective.*

    Raises UnsupportedError on all ranks alike: the ranks cannot share memory.
    """

    name = "shared_memory"

    def __init__(
        self, inner: Transport, limit: TimeLimit, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        super().__init__(inner.rank, inner.size, inner.scratch)
        chunk_bytes = min(chunk_bytes, _SEGMENT_BYTES // (2 * self.size) // 4096 * 4096)
        self.inner = inner
        self.is_trusted = inner.is_trusted
        self.is_threaded = getattr(inner, "is_threaded", True)
        self._chunk_bytes = chunk_bytes
        self._counters_bytes = _LINE_BYTES * _NUM_COUNTERS * self.size
        memory = self._share(limit)
        self._memory: NodeMemory | None = memory
        self._map: mmap.mmap | None = memory.map_shared()
        shared = torch.frombuffer(self._map, dtype=torch.uint8)
        self._counters = memoryview(self._map)[: self._counters_bytes].cast("q")
        slots = shared[self._counters_bytes :].view(2, self.size, chunk_bytes)
        self._slots = [[slots[parity, rank] for rank in range(self.size)] for parity in (0, 1)]
        self._sequence = 0
        inner.barrier(limit)  # nobody counts before all have mapped

    def _share(self, limit: TimeLimit) -> NodeMemory:
        """Rank 0 makes the segment, the others attach; all learn of a failure of any."""
        nbytes = self._counters_bytes + 2 * self.size * self._chunk_bytes
        row = torch.zeros(6, dtype=torch.int64)
        memory: NodeMemory | None = None
        problem: TorchmnError | None = None
        if self.rank == 0:
            try:
                memory = NodeMemory.create(nbytes, _PURPOSE)
                memory.reserve(0, nbytes)
                address = memory.address()
                row = torch.tensor(
                    [1, address.pid, address.number, address.device, address.inode, address.size]
                )
            except (TorchmnError, OSError) as error:
                problem = UnsupportedError(str(error))
        self.inner.broadcast_(row, 0, limit)
        if self.rank != 0 and int(row[0]):
            try:
                memory = NodeMemory.attach(Address(*(int(value) for value in row[1:])))
            except TorchmnError as error:
                problem = error
        num_failed = torch.tensor([0 if memory is not None else 1])
        self.inner.all_reduce_(num_failed, "sum", limit)
        if memory is None or int(num_failed):
            raise UnsupportedError(
                f"{int(num_failed)} of {self.size} ranks of this node cannot share memory"
                + (f": {problem}" if problem else ".")
            )
        return memory

    # ---- collectives in shared memory ----

    def all_reduce_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        """See `Transport.all_reduce_`."""
        is_better_inside = buffer.nbytes <= _SMALL_BYTES and self.inner.name == "mpi"
        if buffer.is_cuda or is_better_inside:
            self.inner.all_reduce_(buffer, op, limit)
            return
        if buffer.nbytes <= _SMALL_BYTES:
            self._all_reduce_small_(buffer, op, limit)
            return
        for chunk in self._chunks(buffer):
            pieces, slots = self._fold_chunk(chunk, op, limit)
            self._wait(_FOLDED, limit)
            for peer in self._others:
                pieces[peer].copy_(slots[peer][peer])

    def _all_reduce_small_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        """Everybody folds everything, in rank order: one wait instead of two."""
        slots = [slot[: buffer.nbytes].view(buffer.dtype) for slot in self._open()]
        slots[self.rank].copy_(buffer)
        self._count(_ARRIVED)
        self._wait(_ARRIVED, limit)
        fold(buffer, slots, op)

    def reduce_(self, buffer: Tensor, root: int, limit: TimeLimit) -> None:
        """See `Transport.reduce_`."""
        if buffer.is_cuda:
            self.inner.reduce_(buffer, root, limit)
            return
        for chunk in self._chunks(buffer):
            pieces, slots = self._fold_chunk(chunk, "sum", limit)
            if self.rank == root:
                self._wait(_FOLDED, limit)
                for peer in self._others:
                    pieces[peer].copy_(slots[peer][peer])

    def broadcast_(self, buffer: Tensor, root: int, limit: TimeLimit) -> None:
        """See `Transport.broadcast_`."""
        if buffer.is_cuda:
            self.inner.broadcast_(buffer, root, limit)
            return
        for chunk in self._chunks(buffer):
            slot = self._open()[root][: chunk.nbytes].view(chunk.dtype)
            if self.rank == root:
                slot.copy_(chunk)
            self._count(_ARRIVED)
            self._wait(_ARRIVED, limit)
            if self.rank != root:
                chunk.copy_(slot)

    def all_gather_stripes_(self, buffer: Tensor, limit: TimeLimit) -> None:
        """See `Transport.all_gather_stripes_`."""
        if buffer.is_cuda:
            self.inner.all_gather_stripes_(buffer, limit)
            return
        stripes = self.stripes(buffer)
        step = max(1, self._chunk_bytes // buffer.element_size())
        for start in range(0, stripes[0].numel(), step):  # stripe 0 is the longest
            parts = [stripe[start : start + step] for stripe in stripes]
            slots = [
                slot[: part.nbytes].view(part.dtype)
                for slot, part in zip(self._open(), parts, strict=True)
            ]
            slots[self.rank].copy_(parts[self.rank])
            self._count(_ARRIVED)
            self._wait(_ARRIVED, limit)
            for peer in self._others:
                parts[peer].copy_(slots[peer])

    def reduce_scatter_stripes_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        """See `Transport.reduce_scatter_stripes_`."""
        if buffer.is_cuda:
            self.inner.reduce_scatter_stripes_(buffer, op, limit)
            return
        stripes = self.stripes(buffer)
        step = max(1, self._chunk_bytes // buffer.element_size() // self.size)
        for start in range(0, stripes[0].numel(), step):
            parts = [stripe[start : start + step] for stripe in stripes]
            slots = self._lay_out(parts)
            self._offer(parts, slots)
            self._wait(_ARRIVED, limit)
            self._fold(parts, slots, op)

    def barrier(self, limit: TimeLimit) -> None:
        """See `Transport.barrier`."""
        self._open()
        self._count(_ARRIVED)
        self._wait(_ARRIVED, limit)

    # ---- one chunk ----

    def _chunks(self, buffer: Tensor) -> Sequence[Tensor]:
        numel = self._chunk_bytes // buffer.element_size()
        if buffer.numel() <= numel:
            return (buffer,) if buffer.numel() else ()
        return list(buffer.split(numel))

    def _fold_chunk(
        self, chunk: Tensor, op: ReduceOp, limit: TimeLimit
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Steps 1 and 2. Returns the stripes of the chunk and of every rank's slot."""
        pieces = self.stripes(chunk)
        slots = self._lay_out(pieces)
        self._offer(pieces, slots)
        self._wait(_ARRIVED, limit)
        self._fold(pieces, slots, op)
        slots[self.rank][self.rank].copy_(pieces[self.rank])
        self._count(_FOLDED)
        return pieces, slots

    def _lay_out(self, pieces: Sequence[Tensor]) -> list[list[Tensor]]:
        """Every rank's slot, cut like ``pieces``."""
        dtype = pieces[0].dtype
        sizes = [piece.numel() for piece in pieces]
        total = sum(sizes) * dtype.itemsize
        return [list(slot[:total].view(dtype).split(sizes)) for slot in self._open()]

    def _offer(self, pieces: Sequence[Tensor], slots: Sequence[Sequence[Tensor]]) -> None:
        for peer in self._others:
            slots[self.rank][peer].copy_(pieces[peer])
        self._count(_ARRIVED)

    def _fold(
        self, pieces: Sequence[Tensor], slots: Sequence[Sequence[Tensor]], op: ReduceOp
    ) -> None:
        mine = pieces[self.rank]
        if mine.numel():
            inputs = [slots[peer][self.rank] for peer in range(self.size)]
            inputs[self.rank] = mine
            fold(mine, inputs, op)

    def _open(self) -> list[Tensor]:
        """Begin the next chunk: every rank's slot for it."""
        self._sequence += 1
        return self._slots[self._sequence % 2]

    def _count(self, counter: int) -> None:
        """Tell the others that this rank has come so far in the current chunk."""
        _fence()
        self._counters[(self.rank * _NUM_COUNTERS + counter) * _LINE_BYTES // 8] = self._sequence

    def _wait(self, counter: int, limit: TimeLimit) -> None:
        """Wait until all ranks have come so far."""
        counters, target = self._counters, self._sequence
        stride = _NUM_COUNTERS * _LINE_BYTES // 8
        offset = counter * _LINE_BYTES // 8
        polls = 0
        started = 0.0
        for peer in self._others:
            index = peer * stride + offset
            while counters[index] < target:
                polls += 1
                if limit.is_eager():
                    if polls < _POLLS_BEFORE_YIELD:
                        continue
                    started = started or time.monotonic()
                    if time.monotonic() - started < _EAGER_S:
                        os.sched_yield()
                        continue
                time.sleep(_POLL_S)
                if limit.left_s == 0.0:
                    raise TimeLimitError(
                        f"rank {peer} of this node did not come within {limit.seconds:g} s."
                    )
        _fence()

    # ---- everything else ----

    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], limit: TimeLimit, tag: int = 0
    ) -> None:
        """See `Transport.exchange`."""
        self.inner.exchange(sends, recvs, limit, tag)

    def split(self, ranks: Sequence[int], key: str, limit: TimeLimit) -> Transport:
        """See `Transport.split`: the part shares memory as well."""
        return SharedMemoryTransport(
            self.inner.split(ranks, key, limit), limit, chunk_bytes=self._chunk_bytes
        )

    def close(self) -> None:
        """Let go of the segment; ``inner`` is its maker's to close."""
        self._slots.clear()
        self._counters.release()
        self._memory = None
        self._map = None  # unmapped when the last tensor over it is gone


_fence_lock = threading.Lock()


def _fence() -> None:
    """Order memory accesses before and after, on processors that reorder stores (ARM).

    Two rounds of acquire and release: what is written before the first release is visible before
    anything after the second acquire. On x86 stores are ordered anyway.
    """
    with _fence_lock:
        pass
    with _fence_lock:
        pass
