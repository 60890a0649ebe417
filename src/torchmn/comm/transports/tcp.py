"""TCP connections for large messages between hosts, with few CPU cycles per byte.

A wrapper around another transport, which carries small messages, GPU tensors, barriers and
broadcasts.

If a rank computes on its only core, an exchange that overlaps the computation costs the time that
its threads take from that core: wake-ups, not the time on the network. At 1 Gb/s 64 KB arrive every
half millisecond, each with a thread switch. ``SO_RCVLOWAT`` keeps the kernel from waking the thread
before 512 KiB have arrived, which is possible because the length of every message is known.

Sums are computed by the owners of stripes as in `Transport.striped_all_reduce_`, but in one pass:
as soon as a piece of a rank's own stripe has arrived from all ranks, it is summed and sent to all
ranks, while the next piece arrives. The all-gather overlaps the reduce-scatter, with bit-identical
results. Two ranks send each other the whole buffer, and both add.

Between the end of one sum and the start of the next the link would be idle: 3 to 5 ms for a bucket
of 4 MB on a core that computes. Sums announced by `prefetch_send` are sent right after the previous
ones, over a second connection with its own order of messages.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchmn.base.errors import CommunicationError, TimeLimitError
from torchmn.cluster.network import own_addresses
from torchmn.cluster.units import KiB, MiB
from torchmn.comm.transports.base import (
    COMBINE,
    Message,
    ReduceOp,
    TimeLimit,
    Transport,
    WrappingTransport,
    fold,
    gather_json,
)
from torchmn.comm.transports.tcp_stream import Stream, memory_of
from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.rank_listener import RankAddress, connect_to_rank, listen_for_ranks

MAX_PEERS = 15
"""With more peers the connections of an all-to-all cost more than they save."""

_LARGE_BYTES = 64 * KiB
_PIECE_BYTES = MiB  # summed and sent on at a time; smaller pieces cost more than they hide
_CONNECT_S = 5.0
_LONGEST_POLL_S = 0.5  # another thread may end the wait
_ROLE = "tcp"


@dataclass(frozen=True)
class _Announcement:
    """A sum announced by `TcpTransport.prefetch_send`."""

    number: int
    address: int
    nbytes: int
    ends: Mapping[int, int]
    """By peer: the position in its stream at which the message to it ends."""


class TcpTransport(WrappingTransport):
    """Large messages over TCP connections; ``inner`` carries the rest. *Collective.*

    Made by `connect`. If the ranks could not be connected, ``fallback_reason`` says why and
    ``inner`` carries everything; groups split from this one may still have connections.
    """

    name = "tcp"

    def __init__(
        self,
        inner: Transport,
        connections: Mapping[int, socket.socket],
        early_connections: Mapping[int, socket.socket],
        fallback_reason: str = "",
    ) -> None:
        super().__init__(inner)
        self.has_fast_small_sums = inner.has_fast_small_sums
        self.fallback_reason = fallback_reason
        if fallback_reason:
            self.name = inner.name
        self._streams = {peer: Stream(peer, each) for peer, each in connections.items()}
        self._early = {peer: Stream(peer, each) for peer, each in early_connections.items()}
        self._by_descriptor = {
            stream.socket.fileno(): stream
            for stream in (*self._streams.values(), *self._early.values())
        }
        self._poll = select.poll()
        self._polled: dict[int, int] = {}  # events by descriptor
        self._announced: deque[_Announcement] = deque()
        self._num_announced = 0

    @classmethod
    def connect(cls, inner: Transport, limit: TimeLimit) -> Transport:
        """Connect all ranks with each other, or none of them. *Collective.*

        Returns ``inner`` itself for a single rank.
        """
        if inner.size == 1:
            return inner
        if inner.size > MAX_PEERS + 1:
            return cls(inner, {}, {}, f"{inner.size} ranks are more than {MAX_PEERS + 1}")
        # Two connections per peer: the second one is for announced sums.
        both = [_connect_all(inner, limit) for _ in range(2)]
        others = [peer for peer in range(inner.size) if peer != inner.rank]
        missing = [peer for peer in others if any(peer not in each for each in both)]
        unreached = sorted({peer for own in gather_json(inner, missing, limit) for peer in own})
        if unreached:
            for connection in (*both[0].values(), *both[1].values()):
                connection.close()
            ranks = f"rank{'s' * (len(unreached) > 1)} {', '.join(map(str, unreached))}"
            return cls(inner, {}, {}, f"{ranks} could not be connected in {_CONNECT_S:g} s")
        return cls(inner, both[0], both[1])

    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], limit: TimeLimit, tag: int = 0
    ) -> None:
        if self.fallback_reason:
            self.inner.exchange(sends, recvs, limit, tag)
            return
        small_sends = [message for message in sends if not _is_large(message)]
        small_recvs = [message for message in recvs if not _is_large(message)]
        if small_sends or small_recvs:
            self.inner.exchange(small_sends, small_recvs, limit, tag)
        if len(small_sends) == len(sends) and len(small_recvs) == len(recvs):
            return
        for peer, tensor in sends:
            if _is_large((peer, tensor)):
                self.sent[peer] += tensor.nbytes
                stream = self._streams[peer]
                stream.num_needed = stream.post_send(tensor, tag)
        for peer, tensor in recvs:
            if _is_large((peer, tensor)):
                self.received[peer] += tensor.nbytes
                self._streams[peer].post_recv(tensor, tag)
        self._run(limit)

    # ---- sums ----

    def all_reduce_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        if self._is_small(buffer):
            self.inner.all_reduce_(buffer, op, limit)
        else:
            self._all_reduce_large_(buffer, op, limit)

    def striped_all_reduce_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        if self._is_small(buffer):
            super().striped_all_reduce_(buffer, op, limit)
        else:
            self._all_reduce_large_(buffer, op, limit)

    def prefetch_send(self, buffer: Tensor) -> None:
        if self._is_small(buffer):
            return
        self._num_announced += 1
        # On the script's thread, while the thread of the exchange may be in `_run`: `post_send` is
        # all that another thread may call.
        ends = {
            peer: self._early[peer].post_send(tensor, 2 * self._num_announced)
            for peer, tensor in self._outgoing(buffer).items()
        }
        self._announced.append(
            _Announcement(self._num_announced, buffer.data_ptr(), buffer.nbytes, ends)
        )

    def _is_small(self, buffer: Tensor) -> bool:
        """Whether a sum of this buffer is left to ``inner``."""
        is_large = buffer.nbytes >= _LARGE_BYTES * self.size and not buffer.is_cuda
        return not is_large or bool(self.fallback_reason)

    def _next_announcement(self, buffer: Tensor) -> _Announcement | None:
        """The announcement of the sum of this buffer; None if the sum was not announced.

        Raises CommunicationError: another sum was announced before it.
        """
        # A copy, because the script's thread may announce another sum meanwhile.
        announced = list(self._announced)
        for index, each in enumerate(announced):
            if (each.address, each.nbytes) == (buffer.data_ptr(), buffer.nbytes):
                if index > 0:
                    raise CommunicationError(
                        f"sum {each.number} is made before sum {announced[0].number}, which was "
                        "announced before it. Sums must be made in the order of their "
                        "announcements."
                    )
                return self._announced.popleft()
        return None

    def _swaps(self, buffer: Tensor) -> bool:
        """Whether two ranks send each other the whole buffer and both compute the sum.

        This sends as many bytes as a sum by stripes, and no rank waits for the sums of the other.
        16-bit floats are summed by stripes, in float32.
        """
        return self.size == 2 and buffer.dtype not in (torch.float16, torch.bfloat16)

    def _outgoing(self, buffer: Tensor) -> dict[int, Tensor]:
        """The first message to each peer: the whole buffer, or the peer's stripe."""
        if self._swaps(buffer):
            return {1 - self.rank: buffer}
        stripes = self.stripes(buffer)
        return {peer: stripes[peer] for peer in self._others}

    def _all_reduce_large_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        outgoing = self._outgoing(buffer)
        own = buffer if self._swaps(buffer) else self.stripes(buffer)[self.rank]
        scratch = self.scratch.take(own.numel() * (self.size - 1), buffer.dtype, buffer.device)
        parts = dict(zip(outgoing, scratch.split(own.numel()), strict=True))
        announced = self._next_announcement(buffer)
        tag = 0 if announced is None else 2 * announced.number
        arriving = []
        for peer, part in parts.items():
            stream = self._streams[peer] if announced is None else self._early[peer]
            # An announced message may have been sent already. Messages announced after it need not
            # be sent before this sum ends.
            stream.num_needed = (
                stream.post_send(outgoing[peer], 0) if announced is None else announced.ends[peer]
            )
            arriving.append(stream.post_recv(part, tag))
            self.sent[peer] += outgoing[peer].nbytes
            self.received[peer] += part.nbytes
        if own is buffer:
            self._run(limit)
            COMBINE[op](buffer, scratch, out=buffer)  # a + b and b + a have the same bits
            return
        for peer, stripe in outgoing.items():
            stream = self._streams[peer]
            stream.post_recv(stripe, tag + 1)
            self.sent[peer] += own.nbytes
            self.received[peer] += stripe.nbytes
            stream.num_needed = stream.post_head(own.nbytes, tag + 1) + own.nbytes
        parts[self.rank] = own
        in_rank_order = [parts[peer] for peer in range(self.size)]
        memory, itemsize = memory_of(own), own.element_size()
        num_summed = 0

        def sum_arrived() -> None:
            nonlocal num_summed
            end = min(message.num_body_bytes for message in arriving) // itemsize
            is_last = end == own.numel()
            if end == num_summed or (not is_last and (end - num_summed) * itemsize < _PIECE_BYTES):
                return
            pieces = [part[num_summed:end] for part in in_rank_order]
            fold(pieces[self.rank], pieces, op)
            piece = memory[num_summed * itemsize : end * itemsize]
            for peer in outgoing:
                self._streams[peer].post_body(piece)
            num_summed = end

        self._run(limit, sum_arrived)

    def _run(self, limit: TimeLimit, on_progress: Callable[[], None] = lambda: None) -> None:
        """Send and receive until all expected messages are complete.

        Announced messages are sent as well, as far as possible in this time. ``on_progress`` is
        called whenever data may have arrived.
        """
        streams, poll, polled = self._by_descriptor, self._poll, self._polled
        # In the first turn all sockets are tried without a call of poll.
        ready = [(descriptor, select.POLLIN | select.POLLOUT) for descriptor in streams]
        longest_s = self.progress_period_s or _LONGEST_POLL_S
        while True:
            for descriptor, events in ready:
                streams[descriptor].advance(events)
            on_progress()
            if all(stream.is_done for stream in streams.values()):
                return
            for descriptor, stream in streams.items():
                if stream.events != polled.get(descriptor, 0):
                    polled[descriptor] = stream.events
                    if stream.events:
                        poll.register(descriptor, stream.events)
                    else:
                        # Registered without events, a closed socket would still end each poll.
                        poll.unregister(descriptor)
            ready = poll.poll(min(limit.left_s, longest_s) * 1e3)
            if self.progress_period_s:
                self.inner.progress()
            if not ready and limit.left_s == 0.0:
                peers = sorted({s.peer for s in streams.values() if not s.is_done})
                raise TimeLimitError(
                    f"an exchange with ranks {peers} of the group did not complete within "
                    f"{limit.seconds:g} s."
                )

    def split(self, ranks: Sequence[int], key: str, limit: TimeLimit) -> Transport:
        """See `Transport.split`. The new group has its own connections."""
        return TcpTransport.connect(self.inner.split(ranks, key, limit), limit)

    def close(self) -> None:
        for stream in self._by_descriptor.values():
            stream.socket.close()
        self._by_descriptor.clear()
        self.inner.close()


def _is_large(message: Message) -> bool:
    """Whether a message uses TCP. Sender and receiver agree, because both know its size."""
    _, tensor = message
    return tensor.nbytes >= _LARGE_BYTES and not tensor.is_cuda


# ---- connecting ----


def _connect_all(inner: Transport, limit: TimeLimit) -> dict[int, socket.socket]:
    """Make a connection to each peer; returns those that succeeded, by rank. *Collective.*

    Every rank listens and sends its address to the others. The higher rank of each pair connects.
    """
    listener, own = listen_for_ranks(own_addresses(inner.own_address), _ROLE)
    with contextlib.closing(listener):
        addresses = [RankAddress(*each) for each in gather_json(inner, own, limit)]
        deadline = time.monotonic() + min(_CONNECT_S, limit.left_s)
        connections = {}
        for peer in range(inner.rank):
            left_s = deadline - time.monotonic()
            found = connect_to_rank(addresses[peer], _ROLE, b"%d\n" % inner.rank, left_s)
            if found is not None:
                connections[peer] = found
        connections |= _accept_peers(listener, range(inner.rank + 1, inner.size), deadline)
        return connections


def _accept_peers(
    listener: AuthenticatedListener, peers: range, deadline: float
) -> dict[int, socket.socket]:
    """Accept connections from ``peers`` until the deadline; returns them by rank."""
    found: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while len(found) < len(peers) and (left_s := deadline - time.monotonic()) > 0:
        poll.poll(min(left_s, 1.0) * 1e3)
        for connection, line in listener.accept():
            rank = int(line)
            if rank in peers and rank not in found:
                found[rank] = connection
            else:
                connection.close()
    return found
