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
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torchmn.communicators.transports.base import (
    COMBINE,
    Message,
    ReduceOp,
    TimeLimit,
    Transport,
)
from torchmn.errors import PeerLostError, TimeLimitError
from torchmn.units import KiB

MOST_PEERS = 15
"""With more the many connections of an all-to-all cost more than they save."""

_LARGE_BYTES = 64 * KiB
_WAKE_BYTES = 512 * KiB
_CONNECT_S = 5.0
_HEAD = struct.Struct("<QQ")  # tag, bytes: what comes next on a connection
_TOKEN_BYTES = 16
_ROW_BYTES = 128
_SIOCGIFADDR = 0x8915


class StreamTransport(Transport):
    """Large messages over sockets of our own, everything else by ``inner``. *Collective.*

    `over` makes one where that is possible.
    """

    name = "streams"

    def __init__(self, inner: Transport, connections: dict[int, socket.socket]) -> None:
        super().__init__(inner.rank, inner.size, inner.scratch)
        self.inner = inner
        self.is_trusted = inner.is_trusted
        self.is_threaded = getattr(inner, "is_threaded", True)
        self._streams = {peer: _Stream(peer, each) for peer, each in connections.items()}

    @classmethod
    def over(cls, inner: Transport, limit: TimeLimit) -> Transport:
        """Connect all ranks with each other; ``inner`` itself if some cannot. *Collective.*"""
        if not 1 < inner.size <= MOST_PEERS + 1:
            return inner
        connections = _connect_all(inner, limit)
        num_failed = torch.tensor([0 if len(connections) == inner.size - 1 else 1])
        inner.all_reduce_(num_failed, "sum", limit)
        if int(num_failed):
            for connection in connections.values():
                connection.close()
            return inner
        return cls(inner, connections)

    @property
    def for_threads(self) -> Transport:
        """See `Transport.for_threads`: a stream has one order for all tags."""
        return self.inner.for_threads

    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], limit: TimeLimit, tag: int = 0
    ) -> None:
        """See `Transport.exchange`."""
        small_sends = [message for message in sends if not _is_large(message)]
        small_recvs = [message for message in recvs if not _is_large(message)]
        if small_sends or small_recvs:
            self.inner.exchange(small_sends, small_recvs, limit, tag)
        if len(small_sends) == len(sends) and len(small_recvs) == len(recvs):
            return
        busy = set()
        for peer, tensor in sends:
            if _is_large((peer, tensor)):
                self._streams[peer].post_send(tensor, tag)
                busy.add(peer)
        for peer, tensor in recvs:
            if _is_large((peer, tensor)):
                self._streams[peer].post_recv(tensor, tag)
                busy.add(peer)
        self._pump([self._streams[peer] for peer in busy], limit)

    def _pump(self, streams: Sequence[_Stream], limit: TimeLimit) -> None:
        """Move bytes until everything that was posted is done."""
        poll = select.poll()
        left = {stream.socket.fileno(): stream for stream in streams}
        while True:
            for descriptor, stream in list(left.items()):
                stream.advance()
                if stream.is_done:
                    del left[descriptor]
                    with contextlib.suppress(KeyError):
                        poll.unregister(descriptor)
                else:
                    poll.register(descriptor, stream.events)
            if not left:
                return
            if not poll.poll(limit.left_s * 1e3) and limit.left_s == 0.0:
                peers = sorted(stream.peer for stream in left.values())
                raise TimeLimitError(
                    f"an exchange with ranks {peers} of the group did not complete within "
                    f"{limit.seconds:g} s."
                )

    # ---- sums ----

    def all_reduce_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        """See `Transport.all_reduce_`."""
        if buffer.is_cuda or buffer.nbytes < _LARGE_BYTES * self.size:
            self.inner.all_reduce_(buffer, op, limit)
        elif self.size == 2 and buffer.dtype not in (torch.float16, torch.bfloat16):
            peer = 1 - self.rank
            theirs = self.scratch.take(buffer.numel(), buffer.dtype, buffer.device)
            self.exchange([(peer, buffer)], [(peer, theirs)], limit)
            COMBINE[op](buffer, theirs, out=buffer)
        else:
            super().all_reduce_(buffer, op, limit)

    def broadcast_(self, buffer: Tensor, root: int, limit: TimeLimit) -> None:
        """See `Transport.broadcast_`."""
        self.inner.broadcast_(buffer, root, limit)

    def barrier(self, limit: TimeLimit) -> None:
        """See `Transport.barrier`."""
        self.inner.barrier(limit)

    # ---- life ----

    def split(self, ranks: Sequence[int], key: str, limit: TimeLimit) -> Transport:
        """See `Transport.split`: the part has connections of its own."""
        return StreamTransport.over(self.inner.split(ranks, key, limit), limit)

    def close(self) -> None:
        """See `Transport.close`."""
        for stream in self._streams.values():
            stream.socket.close()
        self._streams.clear()
        self.inner.close()


class _Stream:
    """One connection: what is still to be sent and received on it, in order."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self.socket = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._out: list[memoryview] = []
        self._in: list[tuple[memoryview, memoryview, bytes]] = []
        self._head = memoryview(bytearray(_HEAD.size))
        self._wake_bytes = 1

    def post_send(self, tensor: Tensor, tag: int) -> None:
        """Send a tensor behind what was posted before."""
        self._out += [memoryview(_HEAD.pack(tag, tensor.nbytes)), _memory(tensor)]

    def post_recv(self, tensor: Tensor, tag: int) -> None:
        """Receive a tensor behind what was posted before."""
        self._in.append((self._head[:], _memory(tensor), _HEAD.pack(tag, tensor.nbytes)))

    @property
    def is_done(self) -> bool:
        """Whether all that was posted was moved."""
        return not self._out and not self._in

    @property
    def events(self) -> int:
        """What to wait for."""
        return (select.POLLOUT if self._out else 0) | (select.POLLIN if self._in else 0)

    def advance(self) -> None:
        """Move what can be moved without waiting. Raises PeerLostError."""
        try:
            self._send()
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
                num_sent = self.socket.send(self._out[0])
                if num_sent == len(self._out[0]):
                    self._out.pop(0)
                else:
                    self._out[0] = self._out[0][num_sent:]

    def _receive(self) -> None:
        while self._in:
            head, body, expected = self._in[0]
            if len(head):
                self._wake_at(len(head) + len(body))
                num_bytes = self.socket.recv_into(head)
                self._raise_if_closed(num_bytes)
                head = head[num_bytes:]
                self._in[0] = (head, body, expected)
                if not len(head):
                    self._raise_if_other(expected)
            else:
                self._wake_at(len(body))
                num_bytes = self.socket.recv_into(body)
                self._raise_if_closed(num_bytes)
                body = body[num_bytes:]
                self._in[0] = (head, body, expected)
                if not len(body):
                    self._in.pop(0)

    def _wake_at(self, num_left: int) -> None:
        """Not to be woken for less than this message still needs, up to a limit."""
        wake_bytes = min(num_left, _WAKE_BYTES)
        if wake_bytes != self._wake_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            self._wake_bytes = wake_bytes

    def _raise_if_closed(self, num_bytes: int) -> None:
        if num_bytes == 0:
            raise PeerLostError(f"rank {self.peer} of the group closed its connection.")

    def _raise_if_other(self, expected: bytes) -> None:
        if bytes(self._head) == expected:
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


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.view(torch.uint8).numpy()))


# ---- connecting ----


def _connect_all(inner: Transport, limit: TimeLimit) -> dict[int, socket.socket]:
    """One connection to each peer, by rank; those that failed are not in it. *Collective.*

    Every rank listens and tells the others where; the higher rank of a pair connects. A token shows
    that it reached whom it meant to, and that nobody else came.
    """
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(inner.size)
        token = secrets.token_bytes(_TOKEN_BYTES)
        addresses = list(_own_addresses())[: (_ROW_BYTES - _TOKEN_BYTES - 3) // 4]
        row = token + struct.pack("<HB", listener.getsockname()[1], len(addresses))
        row += b"".join(socket.inet_aton(address) for address in addresses)
        table = torch.zeros(inner.size, _ROW_BYTES, dtype=torch.uint8)
        table[inner.rank, : len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        inner.all_gather_stripes_(table.view(-1), limit)
        deadline = time.monotonic() + min(_CONNECT_S, limit.left_s)
        connections = {}
        for peer in range(inner.rank):
            found = _reach(table[peer].numpy().tobytes(), inner.rank, deadline)
            if found is not None:
                connections[peer] = found
        # Whoever could not reach somebody has said so by now, or does not come any more.
        for _ in range(inner.rank + 1, inner.size):
            accepted = _accept(listener, token, deadline)
            if accepted is not None:
                connections[accepted[0]] = accepted[1]
        return connections


def _reach(row: bytes, rank: int, deadline: float) -> socket.socket | None:
    """Connect to a rank that listens, at the first of its addresses that leads to it."""
    token, rest = row[:_TOKEN_BYTES], row[_TOKEN_BYTES:]
    port, num_addresses = struct.unpack_from("<HB", rest)
    for index in range(num_addresses):
        address = socket.inet_ntoa(rest[3 + 4 * index : 7 + 4 * index])
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return None
        connection = None
        try:
            connection = socket.create_connection((address, port), timeout=left_s / 2)
            connection.sendall(token + struct.pack("<I", rank))
            if connection.recv(1, socket.MSG_WAITALL) == b"!":
                return connection
        except OSError:
            pass
        if connection is not None:
            connection.close()
    return None


def _accept(
    listener: socket.socket, token: bytes, deadline: float
) -> tuple[int, socket.socket] | None:
    """The next rank that connects and knows the token."""
    while (left_s := deadline - time.monotonic()) > 0:
        listener.settimeout(left_s)
        connection = None
        try:
            connection, _ = listener.accept()
            connection.settimeout(left_s)
            greeting = connection.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
            if len(greeting) == _TOKEN_BYTES + 4 and secrets.compare_digest(
                greeting[:_TOKEN_BYTES], token
            ):
                connection.sendall(b"!")
                return struct.unpack("<I", greeting[_TOKEN_BYTES:])[0], connection
        except OSError:
            pass
        if connection is not None:
            connection.close()
    return None


def _own_addresses() -> Iterator[str]:
    """Where other hosts may reach this one: the interface that gloo was given, else all of them."""
    asked = os.environ.get("GLOO_SOCKET_IFNAME", "")
    names = asked.split(",") if asked else [name for _, name in socket.if_nameindex()]
    # The loopback leads to other ranks of this host only; last, for those.
    for name in sorted(names, key=lambda name: name == "lo"):
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
            contextlib.suppress(OSError),
        ):
            request = struct.pack("256s", name.encode()[:15])
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            yield socket.inet_ntoa(reply[20:24])
