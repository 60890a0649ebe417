"""Bytes with a header, over a connection that blocks: how copies travel."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import TypeAlias

Header: TypeAlias = "dict[str, int | str | bool | list[int | str]]"
Buffer: TypeAlias = "bytes | bytearray | memoryview"

_LENGTHS = struct.Struct("!IQ")
_MOST_HEADER_BYTES = 1 << 24
_MOST_BYTES = 1 << 40
_FIRST_BYTES = 1 << 26


def send_frame(connection: socket.socket, header: Header, parts: Sequence[Buffer] = ()) -> None:
    """Send a header and, as one, the bytes of all parts. Blocks. Raises OSError."""
    words = json.dumps(header).encode()
    views = [memoryview(part).cast("B") for part in parts]
    num_bytes = sum(view.nbytes for view in views)
    connection.sendall(_LENGTHS.pack(len(words), num_bytes) + words)
    for view in views:
        connection.sendall(view)


def receive_frame(connection: socket.socket) -> tuple[Header, bytearray] | None:
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
    header = json.loads(words)
    if not isinstance(header, dict):
        raise ValueError(f"The header of a frame is an object, got {header!r}.")
    return header, payload


def _receive(connection: socket.socket, num_bytes: int) -> bytearray | None:
    """So many bytes, or ``None`` if the connection has ended before the first of them.

    Memory is taken as they come, not as they are promised.
    """
    buffer, at = bytearray(min(num_bytes, _FIRST_BYTES)), 0
    while at < num_bytes:
        if at == len(buffer):
            buffer.extend(bytes(min(len(buffer), num_bytes - at)))
        with memoryview(buffer) as view, view[at:] as rest:
            count = connection.recv_into(rest)
        if not count:
            if at == 0:
                return None
            raise ConnectionResetError("the connection ended inside a frame")
        at += count
    return buffer
