"""Measure the offset of each rank's clock from that of rank 0, by round trips over TCP.

    offset = t0 - (sent + received) / 2,     error = (received - sent) / 2

where t0 is the time of rank 0's clock when it answered. Of several round trips the quickest counts,
whose error is the smallest (Cristian, "Probabilistic clock synchronization", 1989). It is measured
again every minute, since clocks drift.

Rank 0 listens on a separate port and answers from the thread of its record.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections.abc import Sequence

from torchmn.control.rank_listener import RankAddress, connect_to_rank, listen_for_ranks
from torchmn.record.records import ClockOffset

_ROLE = "clock"
_NUM_TRIPS = 12
_LIMIT_S = 2.0
_TIME = struct.Struct("<d")


class ClockServer:
    """Answers the requests of other ranks, on rank 0. Only `stop` is for other threads."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._listener, self.address = listen_for_ranks(addresses, _ROLE)
        self._stopped, self._stop = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (self._listener, self._stopped):
            self._selector.register(each, selectors.EVENT_READ)

    def stop(self) -> None:
        """Have `serve` return now. From any thread: it touches nothing that `serve` uses."""
        self._stop.close()  # which makes the other end readable and wakes the poll

    def serve(self, seconds: float) -> None:
        """Answer requests for this many seconds, or until `stop`."""
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                if key.fileobj is self._stopped:
                    return
                if isinstance(key.fileobj, socket.socket):
                    self._answer(key.fileobj)
            for client, _ in self._listener.accept():
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._selector.register(client, selectors.EVENT_READ)

    def _answer(self, client: socket.socket) -> None:
        try:
            if client.recv(1):
                client.send(_TIME.pack(time.perf_counter()))
                return
        except OSError:
            pass
        self._selector.unregister(client)
        client.close()

    def close(self) -> None:
        """Close the listener and all connections."""
        self._stop.close()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


def measure_offset(server: RankAddress) -> ClockOffset | None:
    """Measure this process's offset from rank 0's clock; None if rank 0 does not answer."""
    connection = connect_to_rank(server, _ROLE, b"rank\n", _LIMIT_S, retries=False)
    if connection is None:
        return None
    best: ClockOffset | None = None
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_LIMIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_NUM_TRIPS):
            sent_s = time.perf_counter()
            connection.sendall(b"?")
            answer = connection.recv(_TIME.size, socket.MSG_WAITALL)
            received_s = time.perf_counter()
            if len(answer) < _TIME.size:
                break
            middle_s = (sent_s + received_s) / 2
            error_s = (received_s - sent_s) / 2
            if best is None or error_s < best.error_s:
                offset_s = _TIME.unpack(answer)[0] - middle_s
                best = ClockOffset(at_s=middle_s, offset_s=offset_s, error_s=error_s)
    return best
