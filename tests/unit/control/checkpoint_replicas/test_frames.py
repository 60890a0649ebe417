from __future__ import annotations

import random
import socket
import threading

import pytest

from torchmn.control.checkpoint_replicas.frames import (
    Done,
    GetRestored,
    PutFile,
    receive_frame,
    send_frame,
)
from torchmn.control.codec import Record
from torchmn.control.messages.elastic import StagedCheckpoint


def test_headers_and_parts_arrive_as_one() -> None:
    here, there = socket.socketpair()
    with here, there:
        header = PutFile(checkpoint=StagedCheckpoint(1, 2, "d"), file="rank0", needs=("rank0",))
        send_frame(here, header, [b"ab", memoryview(b"cd"), bytearray(b"")])
        send_frame(here, GetRestored())
        here.close()
        assert receive_frame(there) == (header, bytearray(b"abcd"))
        assert receive_frame(there) == (GetRestored(), bytearray())
        assert receive_frame(there) is None


def test_a_large_part_arrives_as_it_is() -> None:
    here, there = socket.socketpair()
    part = bytes(range(256)) * (1 << 14)
    with here, there:
        sender = threading.Thread(target=send_frame, args=(here, Done(), [part]))
        sender.start()
        frame = receive_frame(there)
        sender.join()
    assert frame is not None
    assert bytes(frame[1]) == part


def test_an_end_inside_a_frame_is_an_error() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(b"\0\0\0\5\0\0\0\0\0\0\0\1{")
        here.close()
        with pytest.raises(ConnectionResetError):
            receive_frame(there)


def test_random_bytes_are_an_error_and_take_no_memory() -> None:
    chance = random.Random(1)
    for _ in range(200):
        here, there = socket.socketpair()
        with here, there:
            noise = bytes(chance.choice((0, 0, 0, 2, 123, 255)) for _ in range(40))
            here.sendall(noise)
            here.close()
            try:
                frame = receive_frame(there)
            except (OSError, ValueError):
                continue
            assert frame is None or isinstance(frame[0], Record)
