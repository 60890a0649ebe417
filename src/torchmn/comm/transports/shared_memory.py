"""Shared memory between the ranks of one node, for CPU tensors.

A wrapper around another transport, which carries messages; collectives use memory that all ranks of
the node have mapped. The memory has no name (see `shared_segment`), so nothing is left behind after
a kill -9.

Buffers from `allocate` are *resident*: every rank can access those of all ranks, and sums are
computed in place. When all ranks have arrived, each rank reduces (folds) its own stripe over all
ranks' buffers and writes the result into all of them. When all ranks have folded, the sum is
complete. This takes two waits for any size, and each element is read and written once per rank.

Other tensors are copied in chunks that fit into the cache. Each rank has two slots of one chunk,
used in turn:

    1. copy the stripes that others own into the own slot       arrived[r] = k
    2. when all arrived: fold the own stripe over all slots,
       into the own buffer and into the own slot                folded[r] = k
    3. when all folded: copy the others' stripes out of their slots

Before a slot is written again (chunk k+2) all ranks have arrived at chunk k+1 and therefore have
finished reading chunk k: two waits per chunk are enough.

Measured on two cores, sum over 2 ranks: 1 MB in 0.12 ms, 64 MB in 9 ms in chunks; MPI_Allreduce
0.11 ms and 28 ms, gloo 3.7 ms and 46 ms.
"""

from __future__ import annotations

import dataclasses
import mmap
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from torchmn.base.errors import TimeLimitError, TorchmnError, UnsupportedError
from torchmn.cluster.units import KiB, MiB
from torchmn.comm.transports.base import (
    ReduceOp,
    TimeLimit,
    Transport,
    WrappingTransport,
    fold,
    gather_json,
    poll_until,
)
from torchmn.comm.transports.shared_segment import Address, SharedMemorySegment

CHUNK_BYTES = 2 * MiB
_SEGMENT_BYTES = 128 * MiB  # on nodes with many ranks chunks get smaller
_SMALL_BYTES = 32 * KiB
_CACHED_BYTES = 256 * KiB  # folded at a time, so that copies of it come from the cache
_PAGE_BYTES = 4 * KiB


class SharedMemoryTransport(WrappingTransport):
    """Collectives of one node through shared memory; ``inner`` does the rest. *Collective.*

    Raises UnsupportedError on all ranks: the ranks cannot share memory.
    """

    name = "shared_memory"
    is_shared_memory = True

    def __init__(
        self, inner: Transport, limit: TimeLimit, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        super().__init__(inner)
        self._chunk_bytes = min(
            chunk_bytes, _SEGMENT_BYTES // (2 * self.size) // _PAGE_BYTES * _PAGE_BYTES
        )
        head = counters_nbytes(self.size)
        mapped = self._map_together(head + 2 * self.size * self._chunk_bytes, limit)
        self._counters = NodeCounters(memoryview(mapped)[:head].cast("q"), self.rank, self.size)
        slots = torch.frombuffer(mapped, dtype=torch.uint8)[head:]
        slots = slots.view(2, self.size, self._chunk_bytes)
        self._slots = [[slots[parity, rank] for rank in range(self.size)] for parity in (0, 1)]
        self._residents: dict[int, list[Tensor]] = {}
        self._sequence = 0

    def allocate(self, numel: int, dtype: torch.dtype, limit: TimeLimit) -> Tensor:
        """A zeroed buffer that all ranks of the node can access. *Collective.*

        It is resident as long as this rank holds the tensor. Raises UnsupportedError on all ranks:
        too little memory.
        """
        nbytes = -(-max(1, numel * dtype.itemsize) // _PAGE_BYTES) * _PAGE_BYTES
        shared = torch.frombuffer(
            self._map_together(self.size * nbytes, limit), dtype=torch.uint8
        ).view(self.size, nbytes)
        all_ranks = [
            shared[rank, : numel * dtype.itemsize].view(dtype) for rank in range(self.size)
        ]
        mine = all_ranks[self.rank]
        self._residents[mine.data_ptr()] = all_ranks
        # The entry holds aliases, so it cannot keep the tensor that is handed out alive.
        all_ranks[self.rank] = mine.detach()
        weakref.finalize(mine, self._residents.pop, mine.data_ptr(), None)
        return mine

    def _map_together(self, nbytes: int, limit: TimeLimit) -> mmap.mmap:
        """Map ``nbytes`` zero bytes on all ranks: rank 0 creates the memory, the others attach.

        A failure of any rank is raised on all. The file is not needed once all ranks have mapped
        it.
        """
        # Two rounds: the others need the address before they map the memory, and no rank may use it
        # before all have mapped it.
        memory: SharedMemorySegment | None = None
        mapped: mmap.mmap | None = None
        address, problem = None, ""
        try:
            if self.rank == 0:
                memory = SharedMemorySegment.create(nbytes)
                address = dataclasses.astuple(memory.address())
        except (TorchmnError, OSError) as error:
            problem = str(error)
        address, problem = gather_json(self.inner, (address, problem), limit)[0]
        try:
            if address is not None:
                memory = memory or SharedMemorySegment.attach(Address(*address))
                mapped = memory.map_shared()
        except (TorchmnError, OSError) as error:
            problem = str(error)
        for rank, why in enumerate(gather_json(self.inner, problem, limit)):
            if why:
                raise UnsupportedError(
                    f"the {self.size} ranks of this host cannot share memory, because of local "
                    f"rank {rank}: {why.rstrip('.')}."
                )
        return cast(mmap.mmap, mapped)

    # ---- collectives in shared memory ----

    def all_reduce_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        is_better_inside = buffer.nbytes <= _SMALL_BYTES and self.inner.has_fast_small_sums
        if buffer.is_cuda or is_better_inside:
            self.inner.all_reduce_(buffer, op, limit)
            return
        if buffer.nbytes <= _SMALL_BYTES:
            self._all_reduce_small_(buffer, op, limit)
        else:
            self._reduce_to_(buffer, range(self.size), op, limit)

    def _all_reduce_small_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        """Every rank reduces the whole buffer, in rank order: one wait instead of two."""
        self._count_bytes([(self.rank, buffer)], [(self.rank, buffer)])
        slots = [slot[: buffer.nbytes].view(buffer.dtype) for slot in self._open()]
        slots[self.rank].copy_(buffer)
        self._reach(ARRIVED, limit)
        fold(buffer, slots, op)

    def reduce_(self, buffer: Tensor, root: int, limit: TimeLimit) -> None:
        if buffer.is_cuda:
            self.inner.reduce_(buffer, root, limit)
            return
        self._reduce_to_(buffer, (root,), "sum", limit)

    def _reduce_to_(
        self, buffer: Tensor, receivers: Sequence[int], op: ReduceOp, limit: TimeLimit
    ) -> None:
        """Reduce over all ranks into the buffers of ``receivers``; others become undefined."""
        is_receiver = self.rank in receivers
        own = [(self.rank, buffer)]
        self._count_bytes(own, own if is_receiver else [])
        if all_ranks := self._residents.get(buffer.data_ptr()):
            self._fold_resident(all_ranks, buffer, receivers, op, limit)
            return
        for chunk in self._chunks(buffer):
            pieces, slots = self._fold_chunk(chunk, op, limit)
            # Others go on: what a receiver still reads is overwritten two rounds later only.
            if is_receiver:
                self._wait(FOLDED, limit)
                for peer in self._others:
                    pieces[peer].copy_(slots[peer][peer])

    def broadcast_(self, buffer: Tensor, root: int, limit: TimeLimit) -> None:
        if buffer.is_cuda:
            self.inner.broadcast_(buffer, root, limit)
            return
        message = [(self.rank, buffer)]
        self._count_bytes(*((message, []) if self.rank == root else ([], message)))
        if all_ranks := self._residents.get(buffer.data_ptr()):
            self._open()
            self._reach(ARRIVED, limit)
            if self.rank != root:
                buffer.copy_(all_ranks[root][: buffer.numel()])
            # The root may change its buffer as soon as it returns, so it waits for all readers.
            self._reach(FOLDED, limit)
        else:
            for chunk in self._chunks(buffer):
                slot = self._open()[root][: chunk.nbytes].view(chunk.dtype)
                if self.rank == root:
                    slot.copy_(chunk)
                self._reach(ARRIVED, limit)
                # No second wait: the next round uses the other slot.
                if self.rank != root:
                    chunk.copy_(slot)

    def all_gather_stripes_(self, buffer: Tensor, limit: TimeLimit) -> None:
        if buffer.is_cuda:
            self.inner.all_gather_stripes_(buffer, limit)
            return
        stripes = self.stripes(buffer)
        own = (self.rank, stripes[self.rank])
        self._count_bytes([own], [(self.rank, stripes[peer]) for peer in self._others])
        if all_ranks := self._residents.get(buffer.data_ptr()):
            self._open()
            self._reach(ARRIVED, limit)
            for peer in self._others:
                stripes[peer].copy_(self.stripes(all_ranks[peer][: buffer.numel()])[peer])
            self._reach(FOLDED, limit)
            return
        step = max(1, self._chunk_bytes // buffer.element_size())
        for start in range(0, stripes[0].numel(), step):  # stripe 0 is the longest
            parts = [stripe[start : start + step] for stripe in stripes]
            slots = [
                slot[: part.nbytes].view(part.dtype)
                for slot, part in zip(self._open(), parts, strict=True)
            ]
            slots[self.rank].copy_(parts[self.rank])
            self._reach(ARRIVED, limit)
            for peer in self._others:
                parts[peer].copy_(slots[peer])

    def reduce_scatter_stripes_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        if buffer.is_cuda:
            self.inner.reduce_scatter_stripes_(buffer, op, limit)
            return
        self._count_bytes([(self.rank, buffer)], [(self.rank, self.stripes(buffer)[self.rank])])
        if all_ranks := self._residents.get(buffer.data_ptr()):
            self._fold_resident(all_ranks, buffer, (self.rank,), op, limit)
            return
        stripes = self.stripes(buffer)
        step = max(1, self._chunk_bytes // buffer.element_size() // self.size)
        for start in range(0, stripes[0].numel(), step):
            parts = [stripe[start : start + step] for stripe in stripes]
            slots = self._lay_out(parts)
            self._offer(parts, slots)
            self._wait(ARRIVED, limit)
            self._fold(parts, slots, op)

    def barrier(self, limit: TimeLimit) -> None:
        self._open()
        self._reach(ARRIVED, limit)

    # ---- resident buffers ----

    def _fold_resident(
        self,
        all_ranks: Sequence[Tensor],
        buffer: Tensor,
        receivers: Sequence[int],
        op: ReduceOp,
        limit: TimeLimit,
    ) -> None:
        """Reduce this rank's stripe over all ranks' buffers into the buffers of ``receivers``."""
        self._open()
        self._reach(ARRIVED, limit)
        stripes = [self.stripes(one[: buffer.numel()])[self.rank] for one in all_ranks]
        step = _CACHED_BYTES // buffer.element_size()
        for start in range(0, stripes[0].numel(), step):
            parts = [stripe[start : start + step] for stripe in stripes]
            fold(parts[receivers[0]], parts, op)
            for receiver in receivers[1:]:
                parts[receiver].copy_(parts[receivers[0]])
        self._reach(FOLDED, limit)

    # ---- one chunk ----

    def _chunks(self, buffer: Tensor) -> Sequence[Tensor]:
        numel = self._chunk_bytes // buffer.element_size()
        if buffer.numel() <= numel:
            return (buffer,) if buffer.numel() else ()
        return list(buffer.split(numel))

    def _fold_chunk(
        self, chunk: Tensor, op: ReduceOp, limit: TimeLimit
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Steps 1 and 2 above. Returns the stripes of the chunk and of every rank's slot."""
        pieces = self.stripes(chunk)
        slots = self._lay_out(pieces)
        self._offer(pieces, slots)
        self._wait(ARRIVED, limit)
        self._fold(pieces, slots, op)
        slots[self.rank][self.rank].copy_(pieces[self.rank])
        self._count(FOLDED)
        return pieces, slots

    def _lay_out(self, pieces: Sequence[Tensor]) -> list[list[Tensor]]:
        """Begin a round; returns every rank's slot, split into views like ``pieces``."""
        dtype = pieces[0].dtype
        sizes = [piece.numel() for piece in pieces]
        total = sum(sizes) * dtype.itemsize
        return [list(slot[:total].view(dtype).split(sizes)) for slot in self._open()]

    def _offer(self, pieces: Sequence[Tensor], slots: Sequence[Sequence[Tensor]]) -> None:
        for peer in self._others:
            slots[self.rank][peer].copy_(pieces[peer])
        self._count(ARRIVED)

    def _fold(
        self, pieces: Sequence[Tensor], slots: Sequence[Sequence[Tensor]], op: ReduceOp
    ) -> None:
        mine = pieces[self.rank]
        if mine.numel():
            inputs = [slots[peer][self.rank] for peer in range(self.size)]
            inputs[self.rank] = mine
            fold(mine, inputs, op)

    def _open(self) -> list[Tensor]:
        """Begin the next round; returns every rank's slot for it."""
        self._sequence += 1
        return self._slots[self._sequence % 2]

    def _reach(self, counter: int, limit: TimeLimit) -> None:
        """Report that this rank has reached a point, and wait until all ranks have."""
        self._count(counter)
        self._wait(counter, limit)

    def _count(self, counter: int) -> None:
        self._counters.count(counter, self._sequence)

    def _wait(self, counter: int, limit: TimeLimit) -> None:
        self._counters.wait(counter, self._sequence, limit)

    def split(self, ranks: Sequence[int], key: str, limit: TimeLimit) -> Transport:
        """See `Transport.split`. The new group shares memory as well."""
        return SharedMemoryTransport(
            self.inner.split(ranks, key, limit), limit, chunk_bytes=self._chunk_bytes
        )

    def close(self) -> None:
        """Release the memory. Does not close ``inner``, which its owner closes."""
        self._slots.clear()
        self._residents.clear()
        self._counters.close()


# Counters in shared memory, with which the ranks of a node wait for each other.
#
# A rank writes only its own counters and reads those of the others. Each is in a cache line of its
# own: a write would otherwise slow down ranks that poll another counter of the same line.

ARRIVED, FOLDED, NUM_COUNTERS = 0, 1, 2
LINE_BYTES = 128

_POLLS_BEFORE_YIELD = 300
_fence_lock = threading.Lock()


def counters_nbytes(num_ranks: int) -> int:
    """The number of bytes that the counters of ``num_ranks`` ranks need."""
    return LINE_BYTES * NUM_COUNTERS * num_ranks


class NodeCounters:
    """The progress of every rank. ``cells`` is shared memory of `counters_nbytes`, as int64."""

    def __init__(self, cells: memoryview, rank: int, size: int) -> None:
        self._cells = cells
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]

    def count(self, counter: int, value: int) -> None:
        """Set a counter of this rank. Ranks that see it also see this rank's earlier writes."""
        _fence()
        self._cells[_index(self._rank, counter)] = value

    def wait(self, counter: int, value: int, limit: TimeLimit) -> None:
        """Wait until the counters of all ranks have reached ``value``. Raises TimeLimitError."""
        # One after another: the wait ends when the last has arrived, whichever is looked at first.
        for peer in self._peers:
            has_arrived = partial(self._has_arrived, _index(peer, counter), value)
            if not poll_until(has_arrived, limit, _POLLS_BEFORE_YIELD):
                raise TimeLimitError(
                    f"rank {peer} of this node did not arrive within {limit.seconds:g} s."
                )
        _fence()

    def _has_arrived(self, index: int, value: int) -> bool:
        return self._cells[index] >= value

    def close(self) -> None:
        """Release the memory."""
        self._cells.release()


def _index(rank: int, counter: int) -> int:
    return (rank * NUM_COUNTERS + counter) * LINE_BYTES // 8


def _fence() -> None:
    """Memory fence, for processors that reorder stores (ARM). On x86 stores stay in order.

    Python has no fence of its own. Two rounds of acquire and release have the same effect: writes
    before the first release are visible before anything after the second acquire.
    """
    with _fence_lock:
        pass
    with _fence_lock:
        pass
