"""A TCP connection between two ranks: messages in order, sent and received without blocking."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from torchmn.base.errors import PeerLostError
from torchmn.cluster.units import KiB

HEAD = struct.Struct("<QQ")
"""The header of each message: its tag and the number of bytes that follow."""
_WAKE_BYTES = 512 * KiB


@dataclass(slots=True, eq=False)
class Incoming:
    """A message that is expected on a stream, and how much of it has arrived."""

    head: bytes
    body: memoryview
    num_bytes: int = 0
    """Bytes received so far, header and body."""

    @property
    def num_body_bytes(self) -> int:
        """Bytes of the body received so far."""
        return max(0, self.num_bytes - HEAD.size)


class Stream:
    """A connection with the queues of messages to be sent and received on it.

    `post_send` may be called by one thread at a time, all other methods only by the thread that
    runs the exchanges.
    """

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self.socket = connection
        connection.setblocking(False)
        # Or the kernel would hold back a short end of a message until earlier data is acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.num_needed = 0
        """The position up to which the stream must have sent before `is_done`."""
        self._num_posted = 0
        self._num_sent = 0
        self._out: deque[memoryview] = deque()
        self._in: deque[Incoming] = deque()
        self._head = bytearray(HEAD.size)
        self._wake_bytes = 1

    def post_send(self, tensor: Tensor, tag: int) -> int:
        """Queue a tensor to be sent; returns the position at which it ends in the stream."""
        self.post_head(tensor.nbytes, tag)
        return self.post_body(memory_of(tensor))

    def post_head(self, nbytes: int, tag: int) -> int:
        """Queue the header of a message whose body of ``nbytes`` is posted later."""
        return self.post_body(memoryview(HEAD.pack(tag, nbytes)))

    def post_body(self, memory: memoryview) -> int:
        """Queue a part of the body of a message; returns the position at which it ends."""
        self._num_posted += len(memory)
        self._out.append(memory)
        return self._num_posted

    def post_recv(self, tensor: Tensor, tag: int) -> Incoming:
        """Receive into a tensor, after all messages that were posted before."""
        incoming = Incoming(HEAD.pack(tag, tensor.nbytes), memory_of(tensor))
        self._in.append(incoming)
        return incoming

    @property
    def is_done(self) -> bool:
        """Whether all expected messages have been received, and sent up to `num_needed`."""
        return self._num_sent >= self.num_needed and not self._in

    @property
    def events(self) -> int:
        """The poll events that this stream waits for."""
        return (select.POLLOUT if self._out else 0) | (select.POLLIN if self._in else 0)

    def advance(self, events: int) -> None:
        """Send and receive as much as possible without blocking. Raises PeerLostError."""
        try:
            # Neither test is for its own bit only: errors (POLLERR, POLLHUP) lead to a call of the
            # socket, which raises them.
            if events & ~select.POLLIN and self._out:
                self._send()
            if events & ~select.POLLOUT and self._in:
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
                # By index: iteration over a deque fails if another thread appends.
                parts = [self._out[i] for i in range(min(len(self._out), 4))]
                num_sent = self.socket.sendmsg(parts)
                self._num_sent += num_sent
                for part in parts:
                    if num_sent < len(part):
                        self._out[0] = part[num_sent:]
                        return  # until there is room again
                    num_sent -= len(part)
                    self._out.popleft()

    def _receive(self) -> None:
        while self._in:
            message = self._in[0]
            size = HEAD.size + len(message.body)
            self._wake_at(size - message.num_bytes)
            is_head_new = message.num_bytes < HEAD.size
            if is_head_new:
                # The body is received by the same call, before the header is known to be right: a
                # wrong one is an error anyway.
                parts = [memoryview(self._head)[message.num_bytes :], message.body]
                num_bytes = self.socket.recvmsg_into(parts)[0]
            else:
                num_bytes = self.socket.recv_into(message.body[message.num_bytes - HEAD.size :])
            if num_bytes == 0:
                raise PeerLostError(f"rank {self.peer} of the group closed its connection.")
            message.num_bytes += num_bytes
            if is_head_new and message.num_bytes >= HEAD.size:
                self._raise_if_other(message.head)
            if message.num_bytes < size:
                self._wake_at(size - message.num_bytes)
                return  # until enough has arrived
            self._in.popleft()

    def _wake_at(self, num_left: int) -> None:
        """Set how many bytes must have arrived before poll reports the socket as readable."""
        # Never more than the missing bytes, or poll would not return at the end of the message.
        wake_bytes = min(num_left, _WAKE_BYTES)
        if wake_bytes != self._wake_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            self._wake_bytes = wake_bytes

    def _raise_if_other(self, expected: bytes) -> None:
        if self._head == expected:
            return
        (tag, nbytes), (own_tag, own_nbytes) = HEAD.unpack(self._head), HEAD.unpack(expected)
        raise PeerLostError(
            f"rank {self.peer} of the group sent {nbytes} bytes with tag {tag} where {own_nbytes} "
            f"with tag {own_tag} were expected: it is in a different collective."
        )


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    return memoryview(cast(Any, tensor.view(torch.uint8).numpy()))
