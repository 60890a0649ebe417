"""Transports: the interface between collectives and a communication library.

A transport must implement three methods: `exchange`, `split` and `close`. The base class implements
every collective in terms of `exchange`; a transport overrides those for which its library has a
better algorithm. All methods block the calling thread until they are complete and take a
`TimeLimit`. The engine makes them asynchronous and ensures that one thread at a time calls MPI.
Tensors are one-dimensional and contiguous.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from torchmn.base.errors import CommunicationError, UnsupportedError
from torchmn.cluster.units import KiB

ReduceOp = Literal["sum", "product", "max", "min"]
Message = tuple[int, Tensor]  # (peer rank, one-dimensional contiguous tensor)

_SMALL_BYTES = 64 * KiB
_EAGER_S = 0.01
_POLL_S = 0.00003
_UNUSED_TAG = 3  # not used by any message
MAX_DIRECT_RANKS = 16
"""Larger groups all-gather in rounds on CPUs: each rank needs connections to few others."""
SYNCHRONOUS_TAG = 66
"""Messages with this tag or a higher one are sent only when the receiver has posted a receive."""

COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


class QueuedWork(Protocol):
    """Work of a library that is queued on a device without waiting for it."""

    what: str
    """The name of the operation, for error messages."""

    def is_done(self) -> bool:
        """Whether the device has completed the work. Raises its error if it has failed.

        Work that has failed may still occupy the device until `Transport.abort` is called.
        """


class TimeLimit:
    """The deadline of a collective, and how to wait for it.

    ``is_eager()`` returns whether the waiting thread may busy-wait: True on a thread that has
    nothing else to do, False on a thread that shares its core with the computation.

    >>> from torchmn.comm.transports.base import TimeLimit
    >>> TimeLimit(60.0).seconds
    60.0
    """

    __slots__ = ("deadline", "is_eager", "on_queued", "seconds")

    def __init__(self, seconds: float, is_eager: Callable[[], bool] = lambda: True) -> None:
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.is_eager = is_eager
        self.on_queued: Callable[[QueuedWork], None] | None = None
        """Called with work that a transport queued on a device instead of waiting for it.

        The callee then enforces the time limit and calls `Transport.abort` if the work fails. If
        None, the transport does both itself.
        """

    def restart(self) -> None:
        """Move the deadline to ``seconds`` from now."""
        self.deadline = time.monotonic() + self.seconds

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, never negative."""
        return max(0.0, self.deadline - time.monotonic())

    def pause_s(self) -> float:
        """Seconds to sleep between two polls if the thread may not busy-wait."""
        return _POLL_S

    def end(self) -> None:
        """End the wait now, from any thread. See also `abort_pending_receives`."""
        self.deadline = 0.0


class BackoffTimeLimit(TimeLimit):
    """A time limit for long waits at low cost: pauses between polls grow with the time waited."""

    __slots__ = ("_began_s", "_longest_pause_s")

    def __init__(self, seconds: float, longest_pause_s: float) -> None:
        super().__init__(seconds, lambda: False)
        self._began_s = time.monotonic()
        self._longest_pause_s = longest_pause_s

    def pause_s(self) -> float:
        """See `TimeLimit.pause_s`. An eighth of the time waited so far, up to a limit."""
        waited_s = time.monotonic() - self._began_s
        return max(_POLL_S, min(waited_s / 8, self._longest_pause_s))


def poll_until(is_done: Callable[[], bool], limit: TimeLimit, polls_before_yield: int) -> bool:
    """Call ``is_done`` until it returns True; False if the deadline passes first.

    An eager thread busy-waits, then yields its core, then sleeps between polls. Any other thread
    sleeps between polls from the beginning.
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
            return is_done()  # the last poll was before the pause
    return True


class Scratch:
    """One growing byte buffer per device, reused by the collectives of a rank.

    Allocating a 64 MB tensor costs more in page faults than the sum that needs it. Collectives of a
    rank run one at a time, so one buffer is enough.
    """

    def __init__(self, *, pin_memory: bool = False) -> None:
        self._buffers: dict[torch.device, Tensor] = {}
        self._pin_memory = pin_memory

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor of ``numel`` elements, valid until the next call."""
        # Bytes serve every dtype; the largest bucket comes in each step, so nothing is given back.
        nbytes = numel * dtype.itemsize
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[device] = torch.empty(
                max(nbytes, 4 * KiB),
                dtype=torch.uint8,
                device=device,
                pin_memory=self._pin_memory,
            )
        return buffer[:nbytes].view(dtype)


class Transport(ABC):
    """Moves tensors between the ranks of a group.

    Methods are *collective* unless documented otherwise, except `exchange`, which only the senders
    and receivers of its messages call. All may raise TimeLimitError and PeerLostError.

    A subclass defines `exchange`, `split` and `close`:

    >>> from torchmn.comm.transports.base import Transport
    >>> class OneRank(Transport):
    ...     name = "one_rank"
    ...     def exchange(self, sends, recvs, limit, tag=0):
    ...         pass  # it has no peers
    ...     def split(self, ranks, key, limit):
    ...         return OneRank(0, 1, self.scratch)
    ...     def close(self):
    ...         pass
    >>> alone = torchmn.create_communicator("flat", transport=OneRank(0, 1))
    >>> alone.allreduce(torch.ones(2)).tolist()
    [1.0, 1.0]
    >>> alone.finalize()
    """

    name: str
    rank: int
    size: int
    is_trusted = False
    """Whether pickles from peers are accepted: only if no process outside the job can connect."""
    is_concurrent = True
    """Whether two communicators of one rank may run collectives at the same time."""
    is_close_collective = False
    """Whether `close` waits for the other ranks."""
    is_shared_memory = False
    """Whether collectives use memory that all ranks have mapped."""
    has_fast_small_sums = False
    """Whether sums of a few KiB are faster than through shared memory."""
    supports_nccl = False
    progress_period_s: float | None = None
    """The period in seconds at which `progress` must be called; None if it need not be called."""
    own_address: str | None = None
    """The address at which the other ranks reach this host; None if not known."""

    def __init__(self, rank: int, size: int, scratch: Scratch | None = None) -> None:
        self.rank = rank
        self.size = size
        self.scratch = scratch or Scratch()
        self.sent: defaultdict[int, int] = defaultdict(int)
        self.received: defaultdict[int, int] = defaultdict(int)
        """Bytes by peer. Shared memory counts as this rank, a library's collectives as a ring."""

    @property
    def thread_safe_transport(self) -> Transport:
        """A transport of the same ranks whose `exchange` threads may call at the same time.

        Each thread needs a peer or a tag of its own. gloo and MPI allow that; a transport that does
        not returns the one that it wraps.
        """
        return self

    @abstractmethod
    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], limit: TimeLimit, tag: int = 0
    ) -> None:
        """Post all sends and receives at once and block until all are complete.

        Peers must post the matching messages. Empty tensors are skipped on both sides. A rank must
        not send to itself. Messages between the same two ranks keep their order.
        """

    def transports(self) -> Iterator[Transport]:
        """Yield this transport and the transports that it wraps."""
        yield self

    def _count_bytes(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        for peer, tensor in sends:
            self.sent[peer] += tensor.nbytes
        for peer, tensor in recvs:
            self.received[peer] += tensor.nbytes

    def _count_ring(self, nbytes: int) -> None:
        """Count the bytes of a library's all-reduce as if it used a ring of all ranks."""
        if self.size > 1:
            passed = 2 * nbytes * (self.size - 1) // self.size
            self.sent[(self.rank + 1) % self.size] += passed
            self.received[(self.rank - 1) % self.size] += passed

    @abstractmethod
    def split(self, ranks: Sequence[int], key: str, limit: TimeLimit) -> Transport:
        """A transport between ``ranks`` of this group, which must include the caller.

        Every member calls it with the same ranks and the same ``key``. Splits of this transport
        that have a member in common must have different keys.
        """

    def abort(self) -> None:  # noqa: B027 - most transports queue nothing
        """Abort work that is still queued on a device, so that the device can continue. Local.

        The memory that this work should have written is undefined. The transport cannot be used
        afterwards.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all connections. Every rank calls it when no message is pending."""

    def queues(self, buffer: Tensor) -> bool:
        """Whether a sum of this buffer returns once it is queued on the buffer's device. Local."""
        return False

    def prefetch_send(self, buffer: Tensor) -> None:  # noqa: B027 - most transports need no hint
        """Announce a later sum by `all_reduce_` or `striped_all_reduce_`. Local.

        Its first messages may be sent as soon as those of the sums announced before it have been
        sent. All ranks must announce the same sums and compute them in the order of announcement.
        The buffer must not change in between.
        """

    def progress(self) -> None:  # noqa: B027 - most transports send by themselves
        """Make the library send what completed exchanges have left in its buffers. Local.

        Called every `progress_period_s` by a wrapper that waits without calling the library.
        """

    def receive_any(self, buffer: Tensor, limit: TimeLimit, tag: int = 0) -> int:
        """Receive a CPU tensor of known size from whichever rank sends first; returns its rank.

        Called by the receiver only; the sender calls `exchange`. Raises UnsupportedError: this
        transport does not support it.
        """
        raise UnsupportedError(
            f"The transport {self.name} cannot receive from any source. Name the source, or use "
            "transport='torch' or 'mpi'."
        )

    # ---- collectives over `exchange`, overridden where the library is better ----

    def barrier(self, limit: TimeLimit) -> None:
        """Block until all ranks have called it."""
        self.barrier_of(range(self.size), limit)

    def barrier_of(self, ranks: Sequence[int], limit: TimeLimit) -> None:
        """Block until all of ``ranks`` have called it (dissemination barrier, log2 W rounds)."""
        token, received = torch.zeros(2, 1, dtype=torch.uint8, device="cpu")
        index, distance, size = ranks.index(self.rank), 1, len(ranks)
        # After the round of a distance a rank knows of twice as many that they have arrived, from
        # those that it has heard from.
        while distance < size:
            target, source = ranks[(index + distance) % size], ranks[(index - distance) % size]
            self.exchange([(target, token)], [(source, received)], limit)
            distance *= 2

    def broadcast_(self, buffer: Tensor, root: int, limit: TimeLimit) -> None:
        """Copy the root's buffer to all ranks: a tree if small, else scatter and all-gather."""
        if self.size == 1 or buffer.numel() == 0:
            return
        # Down a tree the whole buffer would pass log2 W links one after another. As stripes it
        # leaves the root once, and then all links carry it at the same time.
        if self.size > 2 and buffer.nbytes > _SMALL_BYTES:
            pieces = self.stripes(buffer)
            if self.rank == root:
                sends = [(peer, pieces[peer]) for peer in self._others]
                self.exchange(sends, [], limit)
            else:
                self.exchange([], [(root, pieces[self.rank])], limit)
            self.all_gather_stripes_(buffer, limit)
            return
        # Ranks are counted from the root, so that one tree serves every root.
        virtual = (self.rank - root) % self.size
        reach = 1
        while reach < self.size:
            if virtual < reach and virtual + reach < self.size:
                self.exchange([((virtual + reach + root) % self.size, buffer)], [], limit)
            elif reach <= virtual < 2 * reach:
                self.exchange([], [((virtual - reach + root) % self.size, buffer)], limit)
            reach *= 2

    def all_reduce_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        """Reduce a buffer over all ranks, in place; bit-identical on all ranks."""
        self.striped_all_reduce_(buffer, op, limit)

    def striped_all_reduce_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        """Like `all_reduce_`, by an algorithm that does not depend on the transport.

        Each rank sends each stripe to its owner, which reduces it by `fold`; then an all-gather.
        This sends the same number of bytes as a ring, in two rounds instead of 2(W-1) (Thakur,
        Rabenseifner, Gropp 2005, "long vector" reduce-scatter by pairwise exchange).
        """
        if self.size == 1:
            return
        self.reduce_scatter_stripes_(buffer, op, limit)
        self.all_gather_stripes_(buffer, limit)

    def reduce_(self, buffer: Tensor, root: int, limit: TimeLimit) -> None:
        """Sum over all ranks into the root's buffer; other ranks' buffers become undefined."""
        if self.size == 1:
            return
        self.reduce_scatter_stripes_(buffer, "sum", limit)
        pieces = self.stripes(buffer)
        if self.rank == root:
            self.exchange([], [(peer, pieces[peer]) for peer in self._others], limit)
        else:
            self.exchange([(root, pieces[self.rank])], [], limit)

    def reduce_scatter_stripes_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        """Reduce stripe r of all ranks into stripe r of rank r's buffer, in the order of `fold`."""
        pieces = self.stripes(buffer)
        mine = pieces[self.rank]
        scratch = self.scratch.take(mine.numel() * (self.size - 1), buffer.dtype, buffer.device)
        # Not strict: an empty scratch is split into a single piece.
        received = dict(zip(self._others, scratch.split(max(1, mine.numel())), strict=False))
        self.exchange(
            [(peer, pieces[peer]) for peer in self._others],
            list(received.items()) if mine.numel() else [],
            limit,
        )
        if mine.numel() == 0:
            return
        # Only this rank reduces the stripe, so the order of the pieces needs no agreement.
        received[self.rank] = mine
        fold(mine, [received[peer] for peer in range(self.size)], op)

    def all_gather_stripes_(self, buffer: Tensor, limit: TimeLimit) -> None:
        """Copy stripe r of rank r's buffer to all ranks, for all r."""
        if self.size > MAX_DIRECT_RANKS and not buffer.is_cuda:
            self._all_gather_in_rounds_(buffer, limit)
            return
        pieces = self.stripes(buffer)
        mine = pieces[self.rank]
        self.exchange(
            [(peer, mine) for peer in self._others],
            [(peer, pieces[peer]) for peer in self._others],
            limit,
        )

    def _all_gather_in_rounds_(self, buffer: Tensor, limit: TimeLimit) -> None:
        """All-gather in ceil(log2 W) rounds, with one target and one source each (Bruck 1997).

        A rank holds a run of n consecutive stripes, beginning with its own. In each round it sends
        the run to rank - n and receives the following stripes from rank + n, which doubles n. The
        number of bytes is the same as for sending each stripe to all ranks.
        """
        num_held = 1
        while num_held < self.size:
            num_sent = min(num_held, self.size - num_held)
            target, source = (self.rank - num_held) % self.size, (self.rank + num_held) % self.size
            self.exchange(
                [(target, part) for part in self._run_of_stripes(buffer, self.rank, num_sent)],
                [(source, part) for part in self._run_of_stripes(buffer, source, num_sent)],
                limit,
            )
            num_held += num_sent

    def _run_of_stripes(self, buffer: Tensor, first: int, count: int) -> list[Tensor]:
        """``count`` stripes from ``first`` on: one tensor, or two if they wrap around."""
        size, (quotient, rest) = self.size, divmod(buffer.numel(), self.size)
        begin, end = (
            rank * quotient + min(rank, rest) for rank in (first, (first + count - 1) % size + 1)
        )
        return [buffer[begin:end]] if first + count <= size else [buffer[begin:], buffer[:end]]

    def stripes(self, buffer: Tensor) -> list[Tensor]:
        """Split a buffer into a contiguous stripe per rank; sizes differ by at most one element."""
        return [*buffer.tensor_split(self.size)]

    @property
    def _others(self) -> list[int]:
        """All other ranks, from the next one on, so that ranks begin with different targets."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]


class WrappingTransport(Transport):
    """Base class of transports that delegate to ``inner`` what they do not implement."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.size, inner.scratch)
        self.inner = inner
        self.is_trusted = inner.is_trusted
        self.is_concurrent = inner.is_concurrent
        self.is_close_collective = inner.is_close_collective
        self.supports_nccl = inner.supports_nccl
        self.progress_period_s = inner.progress_period_s
        self.own_address = inner.own_address

    def transports(self) -> Iterator[Transport]:
        """See `Transport.transports`."""
        yield self
        yield from self.inner.transports()

    @property
    def thread_safe_transport(self) -> Transport:
        """See `Transport.thread_safe_transport`."""
        return self.inner.thread_safe_transport

    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], limit: TimeLimit, tag: int = 0
    ) -> None:
        """See `Transport.exchange`."""
        self.inner.exchange(sends, recvs, limit, tag)

    def abort(self) -> None:
        """See `Transport.abort`."""
        self.inner.abort()

    def progress(self) -> None:
        """See `Transport.progress`."""
        self.inner.progress()

    def receive_any(self, buffer: Tensor, limit: TimeLimit, tag: int = 0) -> int:
        """See `Transport.receive_any`."""
        return self.inner.receive_any(buffer, limit, tag)

    def barrier(self, limit: TimeLimit) -> None:
        """See `Transport.barrier`."""
        self.inner.barrier(limit)

    def broadcast_(self, buffer: Tensor, root: int, limit: TimeLimit) -> None:
        """See `Transport.broadcast_`."""
        self.inner.broadcast_(buffer, root, limit)


def gather_json(transport: Transport, value: object, limit: TimeLimit) -> list[Any]:
    """Gather a JSON value from every rank, in rank order. *Collective.*

    Used while a communicator is set up: it needs no more than a transport.
    """
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    # The rows of an all-gather have the same length, so ranks exchange their lengths first.
    sizes = torch.zeros(transport.size, dtype=torch.int64, device="cpu")
    sizes[transport.rank] = len(own)
    transport.all_gather_stripes_(sizes, limit)
    nbytes = sizes.tolist()
    table = torch.zeros(transport.size, max(nbytes), dtype=torch.uint8, device="cpu")
    table[transport.rank, : len(own)] = own
    transport.all_gather_stripes_(table.view(-1), limit)
    return [json.loads(row[:n].numpy().tobytes()) for row, n in zip(table, nbytes, strict=True)]


def abort_pending_receives(transport: Transport) -> None:
    """End receives that wait in other threads, for transports that do not poll. Local.

    A gloo group closes its connections when a receive exceeds its time limit, and nothing else ends
    a thread that waits in gloo. So this posts a receive with a very short limit from each peer.
    Connections to lost peers are closed already. Peers without a message so far are left out: they
    may have no connection, and a receive would make one.
    """
    nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
    # Copies, because the waiting threads may add peers meanwhile.
    peers = {
        p for each in transport.transports() for p in (*each.sent.copy(), *each.received.copy())
    }
    for peer in sorted(peers):
        if peer != transport.rank:
            try:
                limit = TimeLimit(0.001, lambda: False)
                transport.exchange([], [(peer, nothing)], limit, _UNUSED_TAG)
            except CommunicationError:
                continue


def fold(into: Tensor, pieces: Sequence[Tensor], op: ReduceOp) -> None:
    """Reduce ``pieces`` into ``into``, which may be one of them; the others are not changed.

    Pieces are combined in order, except that ``into`` comes first if it is one of them. 16-bit
    floats are summed and multiplied in float32, always in order, and rounded once.
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
