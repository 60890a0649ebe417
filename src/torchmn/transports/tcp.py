"""TCP connections of our own for large messages between hosts, with few cycles spent on each.

A wrapper around another transport: small messages, GPUs, barriers and broadcasts go by that one.

Where a worker computes on the only core that it has, an exchange hidden behind the computation
costs what its threads take from it: not the time on the wire, but the wake-ups. A packet of 64 KB
comes every half millisecond over 1 Gb/s, and with it a change of threads. Here the kernel is told
not to wake anybody before half a megabyte is there (``SO_RCVLOWAT``), which can be said because
the length of every message is known. Measured beside a training step on one core, a sum of 60 MB
over 2 hosts: 110 ms of processor time by gloo's all-reduce, 60 ms so.

Sums are formed at the owners of stripes, see `Transport.all_reduce_`; between two ranks each sends
all it has and adds, which is as many bytes in one round instead of two.

Between the end of one sum and the beginning of the next nothing would be on the wire: 3 to 5 ms for
a bucket of 4 MB on a core that computes. What is announced by `prefetch_send` follows at once behind
the sums before it, over a second connection with an order of its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torchmn.control.authenticated_listener import AuthenticatedListener, connect
from torchmn.environment_variables import SECRET_VARIABLE
from torchmn.errors import CommunicationError, LaunchError, PeerLostError, TimeLimitError
from torchmn.topology.network import address_of
from torchmn.transports.base import COMBINE, Message, ReduceOp, TimeLimit, Transport
from torchmn.transports.gloo_nccl import TorchDistributedTransport
from torchmn.units import KiB

MAX_PEERS = 15
"""With more the many connections of an all-to-all cost more than they save."""

_LARGE_BYTES = 64 * KiB
_WAKE_BYTES = 512 * KiB
_CONNECT_S = 5.0
_HEAD = struct.Struct("<QQ")  # tag, bytes: what comes next on a connection
_TOKEN_BYTES = 16
_ROW_BYTES = 128
_ROLE = "streams"


class TcpTransport(Transport):
    """Large messages over sockets of our own, everything else by ``inner``. *Collective.*

    `over` makes one. Where the ranks could not be connected ``missing`` says why, all goes by
    ``inner``, and its parts may still have connections.
    """

    name = "streams"

    def __init__(
        self,
        inner: Transport,
        connections: dict[int, socket.socket],
        connections_ahead: dict[int, socket.socket],
        missing: str = "",
    ) -> None:
        super().__init__(inner.rank, inner.size, inner.scratch)
        self.inner = inner
        self.missing = missing
        if missing:
            self.name = inner.name
        self.is_trusted = inner.is_trusted
        self.is_threaded = getattr(inner, "is_threaded", True)
        self._streams = {peer: _Stream(peer, each) for peer, each in connections.items()}
        self._ahead = {peer: _Stream(peer, each) for peer, each in connections_ahead.items()}
        self._announced: deque[tuple[int, Sequence[Message]]] = deque()
        self._num_announced = 0

    @classmethod
    def over(cls, inner: Transport, limit: TimeLimit) -> Transport:
        """Connect all ranks with each other, or none of them. *Collective.*"""
        if inner.size == 1:
            return inner
        if inner.size > MAX_PEERS + 1:
            return cls(inner, {}, {}, f"{inner.size} ranks are more than {MAX_PEERS + 1}")
        both = [_connect_all(inner, limit) for _ in range(2)]
        num_missing = torch.zeros(inner.size, dtype=torch.int64, device="cpu")
        for peer in range(inner.size):
            if peer != inner.rank:
                num_missing[peer] += sum(peer not in connections for connections in both)
        inner.all_reduce_(num_missing, "sum", limit)
        unreached = num_missing.nonzero().flatten().tolist()
        if unreached:
            for connection in (*both[0].values(), *both[1].values()):
                connection.close()
            ranks = f"rank{'s' * (len(unreached) > 1)} {', '.join(map(str, unreached))}"
            return cls(inner, {}, {}, f"{ranks} could not be connected in {_CONNECT_S:g} s")
        return cls(inner, both[0], both[1])

    @property
    def thread_safe_transport(self) -> Transport:
        """See `Transport.thread_safe_transport`: a stream has one order for all tags."""
        return self.inner.thread_safe_transport

    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], limit: TimeLimit, tag: int = 0
    ) -> None:
        """See `Transport.exchange`."""
        if self.missing:
            self.inner.exchange(sends, recvs, limit, tag)
            return
        small_sends = [message for message in sends if not _is_large(message)]
        small_recvs = [message for message in recvs if not _is_large(message)]
        if small_sends or small_recvs:
            self.inner.exchange(small_sends, small_recvs, limit, tag)
        if len(small_sends) == len(sends) and len(small_recvs) == len(recvs):
            return
        number = self._announced_number(sends)
        is_announced = number is not None
        streams = self._ahead if is_announced else self._streams
        tag = tag if number is None else number
        for peer, tensor in sends:
            if _is_large((peer, tensor)):
                streams[peer].expect_sent(tensor, tag, is_posted=is_announced)
        for peer, tensor in recvs:
            if _is_large((peer, tensor)):
                streams[peer].post_recv(tensor, tag)
        self._pump(limit)

    def prefetch_send(self, buffer: Tensor) -> None:
        """See `Transport.prefetch_send`."""
        if self.missing or buffer.is_cuda or buffer.nbytes < _LARGE_BYTES * self.size:
            return
        if self._swaps(buffer):
            sends: list[Message] = [(1 - self.rank, buffer)]
        else:
            pieces = self.stripes(buffer)
            sends = [(peer, pieces[peer]) for peer in self._others]
        if all(map(_is_large, sends)):
            self._num_announced += 1
            self._announced.append((self._num_announced, sends))
            for peer, tensor in sends:
                self._ahead[peer].post_send(tensor, self._num_announced)

    def _announced_number(self, sends: Sequence[Message]) -> int | None:
        """Of the next announced sum if it begins with these messages; None if none does."""
        if not self._announced:
            return None
        number, messages = self._announced[0]
        if _are_same(messages, sends):
            self._announced.popleft()
            return number
        for later, messages in list(self._announced)[1:]:
            if _are_same(messages, sends):
                raise CommunicationError(
                    f"sum {later} is made before sum {number}, which was announced before."
                )
        return None

    def _pump(self, limit: TimeLimit) -> None:
        """Move bytes until all that is expected is done, and what was announced meanwhile."""
        poll = select.poll()
        streams = {
            stream.socket.fileno(): stream
            for stream in (*self._streams.values(), *self._ahead.values())
        }
        watched: dict[int, int] = {}
        ready = [(descriptor, select.POLLIN | select.POLLOUT) for descriptor in streams]
        while True:
            for descriptor, events in ready:
                streams[descriptor].advance(events)
            if all(stream.is_done for stream in streams.values()):
                return
            for descriptor, stream in streams.items():
                if stream.events != watched.get(descriptor, 0):
                    watched[descriptor] = stream.events
                    if stream.events:
                        poll.register(descriptor, stream.events)
                    else:
                        poll.unregister(descriptor)
            ready = poll.poll(limit.left_s * 1e3)
            if not ready and limit.left_s == 0.0:
                peers = sorted({s.peer for s in streams.values() if not s.is_done})
                raise TimeLimitError(
                    f"an exchange with ranks {peers} of the group did not complete within "
                    f"{limit.seconds:g} s."
                )

    # ---- sums ----

    def all_reduce_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        """See `Transport.all_reduce_`."""
        if self.missing or buffer.is_cuda or buffer.nbytes < _LARGE_BYTES * self.size:
            self.inner.all_reduce_(buffer, op, limit)
        elif self._swaps(buffer):
            peer = 1 - self.rank
            theirs = self.scratch.take(buffer.numel(), buffer.dtype, buffer.device)
            self.exchange([(peer, buffer)], [(peer, theirs)], limit)
            COMBINE[op](buffer, theirs, out=buffer)
        else:
            super().all_reduce_(buffer, op, limit)

    def _swaps(self, buffer: Tensor) -> bool:
        """Whether the sum is of two whole buffers: 16 bits are folded in float32, by stripes."""
        return self.size == 2 and buffer.dtype not in (torch.float16, torch.bfloat16)

    def broadcast_(self, buffer: Tensor, root: int, limit: TimeLimit) -> None:
        """See `Transport.broadcast_`."""
        self.inner.broadcast_(buffer, root, limit)

    def barrier(self, limit: TimeLimit) -> None:
        """See `Transport.barrier`."""
        self.inner.barrier(limit)

    # ---- life ----

    def receive_any(self, buffer: Tensor, limit: TimeLimit, tag: int = 0) -> int:
        """See `Transport.receive_any`."""
        return self.inner.receive_any(buffer, limit, tag)

    def split(self, ranks: Sequence[int], key: str, limit: TimeLimit) -> Transport:
        """See `Transport.split`: the part has connections of its own."""
        return TcpTransport.over(self.inner.split(ranks, key, limit), limit)

    def close(self) -> None:
        """See `Transport.close`."""
        for stream in (*self._streams.values(), *self._ahead.values()):
            stream.socket.close()
        self._streams.clear()
        self._ahead.clear()
        self.inner.close()


class _Stream:
    """One connection: what is still to be sent and received on it, in order.

    Any one thread may `post_send`; all else is done by the thread that runs the exchanges.
    """

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self.socket = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._out: deque[list[memoryview]] = deque()
        self._in: deque[tuple[memoryview, bytes]] = deque()
        self._head = bytearray(_HEAD.size)
        self._sent_bytes = 0  # of the first message of _out, head and all
        self._received_bytes = 0  # of the first message of _in
        self._num_unsent = 0  # of the messages that were expected
        self._wake_bytes = 1

    def post_send(self, tensor: Tensor, tag: int) -> None:
        """Send a tensor behind what was posted before."""
        self._out.append([memoryview(_HEAD.pack(tag, tensor.nbytes)), _memory(tensor)])

    def expect_sent(self, tensor: Tensor, tag: int, *, is_posted: bool) -> None:
        """Do not be done before the next message, this tensor, is sent."""
        if not is_posted:
            self.post_send(tensor, tag)
        self._num_unsent += 1

    def post_recv(self, tensor: Tensor, tag: int) -> None:
        """Receive a tensor behind what was posted before."""
        self._in.append((_memory(tensor), _HEAD.pack(tag, tensor.nbytes)))

    @property
    def is_done(self) -> bool:
        """Whether all that was expected was moved."""
        return self._num_unsent <= 0 and not self._in

    @property
    def events(self) -> int:
        """What to wait for."""
        return (select.POLLOUT if self._out else 0) | (select.POLLIN if self._in else 0)

    def advance(self, events: int) -> None:
        """Move what can be moved without waiting. Raises PeerLostError."""
        try:
            if events & ~select.POLLIN:
                self._send()
            if events & ~select.POLLOUT:
                self._receive()
        except BlockingIOError:
            pass
        except OSError as error:
            raise PeerLostError(
                f"rank {self.peer} of the group closed its connection ({error.strerror or error})."
            ) from error

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._out:
                head, body = self._out[0]
                self._sent_bytes += self.socket.sendmsg(_rest(head, body, self._sent_bytes))
                if self._sent_bytes < _HEAD.size + len(body):
                    return  # until there is room again
                self._out.popleft()
                self._sent_bytes = 0
                self._num_unsent -= 1

    def _receive(self) -> None:
        while self._in:
            body, expected = self._in[0]
            size = _HEAD.size + len(body)
            self._wake_at(size - self._received_bytes)
            parts = _rest(memoryview(self._head), body, self._received_bytes)
            num_bytes = self.socket.recvmsg_into(parts)[0]
            if num_bytes == 0:
                raise PeerLostError(f"rank {self.peer} of the group closed its connection.")
            is_head_new = self._received_bytes < _HEAD.size
            self._received_bytes += num_bytes
            if is_head_new and self._received_bytes >= _HEAD.size:
                self._raise_if_other(expected)
            if self._received_bytes < size:
                self._wake_at(size - self._received_bytes)
                return  # until enough has come
            self._in.popleft()
            self._received_bytes = 0

    def _wake_at(self, num_left: int) -> None:
        """Not to be woken for less than this message still needs, up to a limit."""
        wake_bytes = min(num_left, _WAKE_BYTES)
        if wake_bytes != self._wake_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            self._wake_bytes = wake_bytes

    def _raise_if_other(self, expected: bytes) -> None:
        if self._head == expected:
            return
        (tag, nbytes), (own_tag, own_nbytes) = _HEAD.unpack(self._head), _HEAD.unpack(expected)
        raise PeerLostError(
            f"rank {self.peer} of the group sent {nbytes} bytes with tag {tag} where {own_nbytes} "
            f"with tag {own_tag} were expected: it is in a different collective."
        )


def _is_large(message: Message) -> bool:
    """The same on both sides, for the sizes of what is sent and received must match."""
    _, tensor = message
    return tensor.nbytes >= _LARGE_BYTES and not tensor.is_cuda


def _are_same(announced: Sequence[Message], sends: Sequence[Message]) -> bool:
    """Whether these are the messages that were announced."""
    return [(p, t.data_ptr(), t.nbytes) for p, t in announced] == [
        (p, t.data_ptr(), t.nbytes) for p, t in sends
    ]


def _rest(head: memoryview, body: memoryview, num_done: int) -> list[memoryview]:
    """What is left of a message."""
    if num_done < _HEAD.size:
        return [head[num_done:], body]
    return [body[num_done - _HEAD.size :]]


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.view(torch.uint8).numpy()))


# ---- connecting ----


def _connect_all(inner: Transport, limit: TimeLimit) -> dict[int, socket.socket]:
    """One connection to each peer, by rank; those that failed are not in it. *Collective.*

    Every rank listens and tells the others where; the higher rank of a pair connects. Each listener
    is a gate whose secret is a token told to the ranks alone, beside that of the job where it has
    one: so each side knows that it reached whom it meant to, and strangers do not get in.
    """
    addresses = _own_addresses(inner)[: (_ROW_BYTES - _TOKEN_BYTES - 3) // 4]
    token = secrets.token_bytes(_TOKEN_BYTES)
    listener = socket.create_server((addresses[0] if len(addresses) == 1 else "", 0), backlog=1024)
    with contextlib.closing(
        AuthenticatedListener(listener, secret=_secret(token), role=_ROLE)
    ) as gate:
        row = token + struct.pack("<HB", listener.getsockname()[1], len(addresses))
        row += b"".join(socket.inet_aton(address) for address in addresses)
        table = torch.zeros(inner.size, _ROW_BYTES, dtype=torch.uint8, device="cpu")
        table[inner.rank, : len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        inner.all_gather_stripes_(table.view(-1), limit)
        deadline = time.monotonic() + min(_CONNECT_S, limit.left_s)
        connections = {}
        for peer in range(inner.rank):
            found = _reach(table[peer].numpy().tobytes(), inner.rank, deadline)
            if found is not None:
                connections[peer] = found
        # Whoever could not reach somebody has said so by now, or does not come any more.
        connections |= _let_in(gate, range(inner.rank + 1, inner.size), deadline)
        return connections


def _reach(row: bytes, rank: int, deadline: float) -> socket.socket | None:
    """Connect to a rank that listens, at the first of its addresses that leads to it."""
    token, rest = row[:_TOKEN_BYTES], row[_TOKEN_BYTES:]
    port, num_addresses = struct.unpack_from("<HB", rest)
    for index in range(num_addresses):
        address = socket.inet_ntoa(rest[3 + 4 * index : 7 + 4 * index])
        is_last = index == num_addresses - 1
        left_s = (deadline - time.monotonic()) / (1 if is_last else 2)
        if left_s <= 0:
            return None
        with contextlib.suppress(LaunchError):
            return connect(
                f"{address}:{port}",
                secret=_secret(token),
                role=_ROLE,
                line=b"%d\n" % rank,
                limit_s=left_s,
            )
    return None


def _let_in(gate: AuthenticatedListener, peers: range, deadline: float) -> dict[int, socket.socket]:
    """The connections of these ranks, as far as they come in time."""
    found: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(gate, select.POLLIN)
    while len(found) < len(peers) and (left_s := deadline - time.monotonic()) > 0:
        poll.poll(min(left_s, 1.0) * 1e3)
        for connection, line in gate.accept():
            rank = int(line)
            if rank in peers and rank not in found:
                found[rank] = connection
            else:
                connection.close()
    return found


def _secret(token: bytes) -> str:
    return f"{os.environ.get(SECRET_VARIABLE, '')} {token.hex()}"


def _own_addresses(inner: Transport) -> list[str]:
    """Where others may reach this rank, best first.

    The address or the interface that gloo was given, else those of all interfaces.
    """
    asked = os.environ.get("GLOO_SOCKET_IFNAME", "")
    own = inner.own_address if isinstance(inner, TorchDistributedTransport) else None
    if own is not None and not asked:
        return [own]
    names = asked.split(",") if asked else [name for _, name in socket.if_nameindex()]
    # The loopback leads to other ranks of this host only; last, for those.
    found = map(address_of, sorted(names, key=lambda name: name == "lo"))
    return [address for address in found if address is not None]
