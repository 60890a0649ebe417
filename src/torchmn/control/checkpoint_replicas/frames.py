"""Bytes with a header, over a connection that blocks: how copies travel."""

from __future__ import annotations

import json
import mmap
import socket
import struct
from collections.abc import Sequence
from typing import TypeAlias

Header: TypeAlias = "dict[str, int | str | bool | list[int | str]]"
Payload: TypeAlias = "bytearray | mmap.mmap"
Buffer: TypeAlias = "bytes | bytearray | memoryview | mmap.mmap"

_LENGTHS = struct.Struct("!IQ")
_MOST_HEADER_BYTES = 1 << 24
_MOST_BYTES = 1 << 40
_LARGE_BYTES = 1 << 20


def send_frame(connection: socket.socket, header: Header, parts: Sequence[Buffer] = ()) -> None:
    """Send a header and, as one, the bytes of all parts. Blocks. Raises OSError."""
    words = json.dumps(header).encode()
    views = [memoryview(part).cast("B") for part in parts]
    num_bytes = sum(view.nbytes for view in views)
    connection.sendall(_LENGTHS.pack(len(words), num_bytes) + words)
    for view in views:
        connection.sendall(view)


def receive_frame(connection: socket.socket) -> tuple[Header, Payload] | None:
    """The next header and its bytes; ``None`` at the end. Blocks.

    Raises OSError: the connection broke. Raises ValueError: this is no frame.
    """
    lengths = _receive(connection, _LENGTHS.size)
    if lengths is None:
        return None
    num_words, num_bytes = _LENGTHS.unpack(lengths)
    if num_words > _MOST_HEADER_BYTES or num_bytes > _MOST_BYTES:
        raise ValueError(f"A frame of {num_words} and {num_bytes} bytes is none of ours.")
    words, payload = _receive(connection, num_words), _receive(connection, num_bytes)
    if words is None or payload is None:
        raise ConnectionResetError("the connection ended inside a frame")
    header = json.loads(bytes(words))
    if not isinstance(header, dict):
        raise ValueError(f"The header of a frame is an object, got {header!r}.")
    return header, payload


def _receive(connection: socket.socket, num_bytes: int) -> Payload | None:
    """So many bytes, or ``None`` if the connection has ended before the first of them."""
    # a large bytearray would be filled with zeros first; pages of a map are taken as bytes come
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
