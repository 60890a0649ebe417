"""Measure a link: round trips of one byte, then as many bytes as pass in a given time.

Every host listens on a port that the system chose, for clients that know the examination's secret.
The rate is that at which bytes arrive; its first part is left out, in which TCP finds the rate.
"""

import select
import socket
import statistics
import struct
import threading
import time
from contextlib import suppress

from torchmn.base.errors import LaunchError
from torchmn.cluster.units import KiB
from torchmn.control.authenticated_listener import AuthenticatedListener, connect
from torchmn.control.codec import Record, decode, encode
from torchmn.control.connection import listen_on
from torchmn.doctor.findings import LinkMeasured, MeasureLink

_ROLE = "doctor's link probe"
_CONNECT_S = 3.0
_SILENCE_S = 3.0
_ECHO_S = 0.2
_MAX_ECHOES, _MIN_ECHOES = 100, 5
_CHUNK_BYTES = 256 * KiB
_LEFT_OUT = 0.3  # share of the time at the beginning, in which TCP still raises its rate
_TCP_INFO_BYTES = 144
_ABORT = struct.pack("ii", 1, 0)


class Incoming(Record, frozen=True, kw_only=True):
    """The client's identity: how long to receive after the echoes."""

    seconds: float


class Received(Record, frozen=True):
    """The reply of the receiver: the rate at which bytes arrived."""

    bytes_per_s: float


def serve_probes(secret: str) -> int:
    """Answer probes in background threads until this process ends. Returns the port."""
    listener = listen_on("")
    port: int = listener.getsockname()[1]
    accepting = AuthenticatedListener(listener, secret=secret, role=_ROLE)
    threading.Thread(target=_accept, args=(accepting,), daemon=True).start()
    return port


def measure_link(order: MeasureLink, secret: str) -> LinkMeasured:
    """Measure the link from this host to an address. Local."""
    address = f"{order.address}:{order.port}"
    line = encode(Incoming(seconds=order.seconds))
    try:
        socket.create_connection((order.address, order.port), _CONNECT_S).close()
        connection = connect(
            address, secret=secret, role=_ROLE, line=line, limit_s=_CONNECT_S, retries=False
        )
    except (OSError, LaunchError) as error:
        return LinkMeasured(error=str(error))
    with connection:
        try:
            connection.settimeout(_SILENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            latency_s = _measure_latency(connection)
            received = _send(connection, order.seconds)
            return LinkMeasured(
                bytes_per_s=received.bytes_per_s,
                latency_s=latency_s,
                retransmitted=_retransmitted(connection),
            )
        except (OSError, ValueError) as error:
            return LinkMeasured(error=f"it connects, but then: {error}")
        finally:
            # what the other side does not read is not sent to it
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)


def _accept(accepting: AuthenticatedListener) -> None:
    while True:
        select.select([accepting], [], [], 1.0)
        for connection, identity in accepting.accept():
            threading.Thread(target=_answer, args=(connection, identity), daemon=True).start()


def _answer(connection: socket.socket, identity: bytes) -> None:
    """Echo single bytes up to the last, which is a 1, then receive and report the rate."""
    with connection, suppress(OSError, ValueError):
        seconds = decode(identity, Incoming).seconds
        connection.setblocking(True)
        connection.settimeout(_SILENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (byte := connection.recv(1)) == b"\0":
            connection.sendall(byte)
        if byte:
            connection.sendall(byte)
            connection.sendall(encode(Received(_receive(connection, seconds))))
            connection.recv(1 << 20)  # the client aborts the connection


def _measure_latency(connection: socket.socket) -> float:
    times: list[float] = []
    end = time.monotonic() + _ECHO_S
    is_last = False
    while not is_last:
        enough = time.monotonic() > end and len(times) >= _MIN_ECHOES
        is_last = enough or len(times) == _MAX_ECHOES
        started = time.perf_counter()
        connection.sendall(b"\1" if is_last else b"\0")
        if not connection.recv(1):
            raise ConnectionAbortedError("the other host closed the connection")
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _send(connection: socket.socket, seconds: float) -> Received:
    """Send until the receiver reports its rate."""
    chunk = memoryview(bytes(_CHUNK_BYTES))
    connection.setblocking(False)
    deadline = time.monotonic() + seconds + _SILENCE_S
    answer = b""
    while not answer.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"single bytes arrive, but no long messages for {_SILENCE_S:g} s")
        readable, writable, _ = select.select([connection], [connection], [], left_s)
        if readable:
            part = connection.recv(1 << 12)
            if not part:
                raise ConnectionAbortedError("the other host closed the connection")
            answer += part
        elif writable:
            with suppress(BlockingIOError):
                connection.send(chunk)
    return decode(answer, Received)


def _receive(connection: socket.socket, seconds: float) -> float:
    buffer = bytearray(_CHUNK_BYTES)
    total = connection.recv_into(buffer)
    started = now = time.monotonic()
    counted, counted_from = 0, 0.0
    while now < started + seconds:
        got = connection.recv_into(buffer)
        if not got:
            break
        now = time.monotonic()
        total += got
        if counted_from:
            counted += got
        elif now - started >= _LEFT_OUT * seconds:
            counted_from = now
    if counted:
        return counted / (now - counted_from)
    return total / max(now - started, 1e-9)


def _retransmitted(connection: socket.socket) -> float:
    """Return the share of packets sent again, from the kernel's counters; 0 without these."""
    found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(found) < _TCP_INFO_BYTES:
        return 0.0
    (again,), (sent,) = struct.unpack_from("I", found, 100), struct.unpack_from("I", found, 136)
    return float(again / sent) if sent else 0.0
