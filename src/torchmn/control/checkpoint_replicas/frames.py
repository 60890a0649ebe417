"""A typed header with bytes, over a connection that blocks: how checkpoint replicas are sent.

A frame is the length of the header, the length of the bytes, the header as a line of JSON
(`torchmn.control.codec`), and the bytes. The requests are those of `ReplicaServer`.
"""

from __future__ import annotations

import mmap
import socket
import struct
from collections.abc import Sequence
from typing import TypeAlias

from torchmn.control.codec import Record, decode_union, encode
from torchmn.control.messages.elastic import StagedCheckpoint


class GetRestored(Record, frozen=True):
    """Requests the checkpoint that this round continues from. The reply is `Restored`."""


class GetFile(Record, frozen=True, kw_only=True):
    """Requests the bytes of a file. The reply is `Done` with them."""

    checkpoint: StagedCheckpoint
    file: str


class PutFile(Record, frozen=True, kw_only=True):
    """Brings the bytes of a file. The reply is `Done`; ``needs`` as in `FileHeld`."""

    checkpoint: StagedCheckpoint
    file: str
    needs: tuple[str, ...] = ()


class Announce(Record, frozen=True, kw_only=True):
    """The checkpoint of this step is finished. The reply is `Done`."""

    step: int


class Restored(Record, frozen=True, kw_only=True):
    """The checkpoint that this round continues from, if it is held in memory."""

    checkpoint: StagedCheckpoint | None


class Done(Record, frozen=True, kw_only=True):
    """The request was carried out; ``is_held_twice``: another host holds the file, too."""

    is_held_twice: bool = False


class Rejected(Record, frozen=True, kw_only=True):
    """The request was not carried out, and why."""

    reason: str


Request = GetRestored | GetFile | PutFile | Announce
Reply = Restored | Done | Rejected
Header = Request | Reply
Payload: TypeAlias = "bytearray | mmap.mmap"
Buffer: TypeAlias = "bytes | bytearray | memoryview | mmap.mmap"

_LENGTHS = struct.Struct("!IQ")
_MAX_HEADER_BYTES = 1 << 24
_MAX_BYTES = 1 << 40
_LARGE_BYTES = 1 << 20


def send_frame(connection: socket.socket, header: Header, parts: Sequence[Buffer] = ()) -> None:
    """Send a header and the concatenated bytes of all parts. Blocks. Raises OSError."""
    text = encode(header)
    views = [memoryview(part).cast("B") for part in parts]
    num_bytes = sum(view.nbytes for view in views)
    connection.sendall(_LENGTHS.pack(len(text), num_bytes) + text)
    for view in views:
        connection.sendall(view)


def receive_frame(connection: socket.socket) -> tuple[Header, Payload] | None:
    """The next header and its bytes; ``None`` at the end. Blocks.

    Raises OSError: the connection broke. Raises ValueError: this is not a frame.
    """
    lengths = _receive(connection, _LENGTHS.size)
    if lengths is None:
        return None
    num_header_bytes, num_bytes = _LENGTHS.unpack(lengths)
    if num_header_bytes > _MAX_HEADER_BYTES or num_bytes > _MAX_BYTES:
        raise ValueError(f"A frame of {num_header_bytes} and {num_bytes} bytes is too large.")
    text, payload = _receive(connection, num_header_bytes), _receive(connection, num_bytes)
    if text is None or payload is None:
        raise ConnectionResetError("the connection ended inside a frame")
    return decode_union(bytes(text), Header), payload


def _receive(connection: socket.socket, num_bytes: int) -> Payload | None:
    """This number of bytes, or ``None`` if the connection has ended before the first of them."""
    # a large bytearray would be filled with zeros first; a map gets its pages as bytes arrive
    buffer = bytearray(num_bytes) if num_bytes < _LARGE_BYTES else mmap.mmap(-1, num_bytes)
    view, at = memoryview(buffer), 0
    while at < num_bytes:
        count = connection.recv_into(view[at:])
        if not count:
            if at == 0:
                return None
            raise ConnectionResetError("the connection ended inside a frame")
        at += count
    return buffer
