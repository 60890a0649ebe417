"""What carries the bytes: the seam between collectives and a communication library.

A transport is three methods (`exchange`, `split`, `close`). Every collective has an algorithm over
`exchange` here; a transport overrides those which its library does better. All of them block the
calling thread until done and take a `TimeLimit`; asynchrony is the engine's business, so that the
MPI calls of a process come from one thread. Tensors are one-dimensional and contiguous.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from torchmn.errors import CommunicationError, UnsupportedError
from torchmn.units import KiB

ReduceOp = Literal["sum", "product", "max", "min"]
Message = tuple[int, Tensor]  # (peer rank, one-dimensional contiguous tensor)

_SMALL_BYTES = 64 * KiB
_EAGER_S = 0.01
_POLL_S = 0.00003
_NEVER_TAG = 3  # no message of ours has it

COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


class TimeLimit:
    """The moment by which a collective must be done, and how politely to wait for it.

    ``is_eager()`` says whether the waiting thread may spin: yes on a thread that has nothing else
    to do, no on a thread that shares its core with the computation.
    """

    __slots__ = ("deadline", "is_eager", "seconds")

    def __init__(self, seconds: float, is_eager: Callable[[], bool] = lambda: True) -> None:
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.is_eager = is_eager

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, never negative."""
        return max(0.0, self.deadline - time.monotonic())

    def pause_s(self) -> float:
        """How long a waiter that may not spin sleeps between two polls."""
        return _POLL_S


class BackoffTimeLimit(TimeLimit):
    """A wait that may be long and costs little: the longer it lasts, the longer the pauses.

    `end` makes it end now, from another thread, with the error of a limit that has passed.
    """

    __slots__ = ("_began_s", "_longest_pause_s")

    def __init__(self, seconds: float, longest_pause_s: float) -> None:
        super().__init__(seconds, lambda: False)
        self._began_s = time.monotonic()
        self._longest_pause_s = longest_pause_s

    def pause_s(self) -> float:
        """See `TimeLimit.pause_s`. What comes is noticed an eighth of the waiting time late."""
        waited_s = time.monotonic() - self._began_s
        return max(_POLL_S, min(waited_s / 8, self._longest_pause_s))

    def end(self) -> None:
        """The limit has passed."""
        self.deadline = 0.0


def poll_until(is_done: Callable[[], bool], limit: TimeLimit, polls_before_yield: int) -> bool:
    """Ask ``is_done`` until it says yes, or until the limit has passed: then False.

    An eager waiter spins, then yields its core, then sleeps between polls; any other sleeps from
    the beginning.
    """
    polls = 0
    yields_since_s = 0.0
    while not is_done():
        polls += 1
        if limit.is_eager():
            if polls < polls_before_yield:
                continue
            yields_since_s = yields_since_s or time.monotonic()
            if time.monotonic() - yields_since_s < _EAGER_S:
                os.sched_yield()
                continue
        time.sleep(limit.pause_s())
        if limit.left_s == 0.0:
            return is_done()
    return True


class Scratch:
    """One growing byte buffer per device, reused by the collectives of a rank.

    A fresh 64 MB tensor costs more in page faults than the sum that it is needed for. Collectives
    of a rank run one at a time, so one buffer is enough.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.device, Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor of ``numel`` elements, valid until the next call."""
        nbytes = numel * dtype.itemsize
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < nbytes:
            buffer = torch.empty(max(nbytes, 4 * KiB), dtype=torch.uint8, device=device)
            self._buffers[device] = buffer
        return buffer[:nbytes].view(dtype)


class Transport(ABC):
    """Moves tensors between the ranks of one group. Every method but `exchange` is collective.

    Raises from every method: TimeLimitError, PeerLostError.
    """

    name: str
    rank: int
    size: int
    is_trusted = False
    """Whether peers may send pickles: true where only the ranks of the job can connect."""

    def __init__(self, rank: int, size: int, scratch: Scratch | None = None) -> None:
        self.rank = rank
        self.size = size
        self.scratch = scratch or Scratch()

    @property
    def thread_safe_transport(self) -> Transport:
        """The same ranks, where threads may exchange at once: each with a peer or tag of its own.

        That is what gloo and MPI allow; a transport that does not names the one under it.
        """
        return self

    @abstractmethod
    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], limit: TimeLimit, tag: int = 0
    ) -> None:
        """Post all sends and receives at once and return when all are done.

        Peers must post the matching messages; empty tensors are skipped on both sides; a message
        to oneself is not allowed. Messages between the same two ranks keep their order.
        """

    @abstractmethod
    def split(self, ranks: Sequence[int], key: str, limit: TimeLimit) -> Transport:
        """A transport among ``ranks`` (ranks of this group, which must hold the caller's).

        Every member calls it with the same ranks and the same ``key``, which no other split of
        this transport with a common member may have used.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections. Call it on every rank; nothing may be in flight."""

    def prefetch_send(self, buffer: Tensor) -> None:  # noqa: B027 - most transports need no hint
        """Announce the sum of a buffer, by `all_reduce_` or `reduce_scatter_stripes_`. Local.

        What the sum sends first may then leave behind the sums that were announced before it. All
        ranks announce the same in the same order and sum in that order; the buffer stays as it is
        until then.
        """

    def receive_any(self, buffer: Tensor, limit: TimeLimit, tag: int = 0) -> int:
        """Receive a CPU tensor of known size from whichever rank sends first; returns its rank.

        Called by the receiver; the sender uses `exchange`. Raises UnsupportedError: this transport
        knows no such thing.
        """
        raise UnsupportedError(
            f"The transport {self.name} cannot receive from any source. Name the source, or use "
            "transport='torch' or 'mpi'."
        )

    # ---- collectives over `exchange`, overridden where the library is better ----

    def barrier(self, limit: TimeLimit) -> None:
        """Return when every rank has arrived (dissemination: log2 W rounds)."""
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        heard = torch.zeros(1, dtype=torch.uint8, device="cpu")
        distance = 1
        while distance < self.size:
            ahead, behind = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            self.exchange([(ahead, token)], [(behind, heard)], limit)
            distance *= 2

    def broadcast_(self, buffer: Tensor, root: int, limit: TimeLimit) -> None:
        """Give every rank the root's buffer: a tree when small, scatter and all-gather else."""
        if self.size == 1 or buffer.numel() == 0:
            return
        if self.size > 2 and buffer.nbytes > _SMALL_BYTES:
            pieces = self.stripes(buffer)
            if self.rank == root:
                sends = [(peer, pieces[peer]) for peer in self._others]
                self.exchange(sends, [], limit)
            else:
                self.exchange([], [(root, pieces[self.rank])], limit)
            self.all_gather_stripes_(buffer, limit)
            return
        virtual = (self.rank - root) % self.size
        reach = 1
        while reach < self.size:
            if virtual < reach and virtual + reach < self.size:
                self.exchange([((virtual + reach + root) % self.size, buffer)], [], limit)
            elif reach <= virtual < 2 * reach:
                self.exchange([], [((virtual - reach + root) % self.size, buffer)], limit)
            reach *= 2

    def all_reduce_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        """Reduce over the ranks, in place, the same bits on every rank.

        Direct reduce-scatter to stripe owners, who fold in rank order, then all-gather: the same
        bytes as a ring in two rounds instead of 2(W-1) (Thakur, Rabenseifner, Gropp 2005, "long
        vector" reduce-scatter by pairwise exchange).
        """
        if self.size == 1:
            return
        self.reduce_scatter_stripes_(buffer, op, limit)
        self.all_gather_stripes_(buffer, limit)

    def reduce_(self, buffer: Tensor, root: int, limit: TimeLimit) -> None:
        """Sum over the ranks into the root's buffer; other ranks' buffers become undefined."""
        if self.size == 1:
            return
        self.reduce_scatter_stripes_(buffer, "sum", limit)
        pieces = self.stripes(buffer)
        if self.rank == root:
            self.exchange([], [(peer, pieces[peer]) for peer in self._others], limit)
        else:
            self.exchange([(root, pieces[self.rank])], [], limit)

    def reduce_scatter_stripes_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        """Fold stripe r of all ranks into stripe r of rank r's buffer, in rank order."""
        pieces = self.stripes(buffer)
        mine = pieces[self.rank]
        scratch = self.scratch.take(mine.numel() * (self.size - 1), buffer.dtype, buffer.device)
        received = dict(zip(self._others, scratch.split(max(1, mine.numel())), strict=False))
        self.exchange(
            [(peer, pieces[peer]) for peer in self._others],
            list(received.items()) if mine.numel() else [],
            limit,
        )
        if mine.numel() == 0:
            return
        received[self.rank] = mine
        fold(mine, [received[peer] for peer in range(self.size)], op)

    def all_gather_stripes_(self, buffer: Tensor, limit: TimeLimit) -> None:
        """Give every rank stripe r of rank r's buffer, for all r."""
        pieces = self.stripes(buffer)
        mine = pieces[self.rank]
        self.exchange(
            [(peer, mine) for peer in self._others],
            [(peer, pieces[peer]) for peer in self._others],
            limit,
        )

    def stripes(self, buffer: Tensor) -> list[Tensor]:
        """Cut a buffer into one contiguous stripe per rank, sizes differing by at most one."""
        return [*buffer.tensor_split(self.size)]

    @property
    def _others(self) -> list[int]:
        """All other ranks, starting behind this one, so that no rank is everybody's first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]


def abort_pending_receives(transport: Transport) -> None:
    """End what waits on this transport in other threads, where it does not poll. Local.

    A gloo group closes its connections when a receive has passed its time limit, and nothing else
    ends a thread that waits in it. Those to peers that are gone are closed already.
    """
    nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
    for peer in range(transport.size):
        if peer != transport.rank:
            try:
                limit = TimeLimit(0.001, lambda: False)
                transport.exchange([], [(peer, nothing)], limit, _NEVER_TAG)
            except CommunicationError:
                continue


def fold(into: Tensor, pieces: Sequence[Tensor], op: ReduceOp) -> None:
    """Reduce ``pieces`` into ``into``, which may be one of them; the others are only read.

    16-bit floats are summed and multiplied in float32 and rounded once.
    """
    combine = COMBINE[op]
    if op in ("sum", "product") and into.dtype in (torch.float16, torch.bfloat16):
        total = pieces[0].float()
        for piece in pieces[1:]:
            combine(total, piece, out=total)
        into.copy_(total)
        return
    rest = [piece for piece in pieces if piece is not into]
    if len(rest) == len(pieces):
        into.copy_(rest.pop(0))
    for piece in rest:
        combine(into, piece, out=into)
