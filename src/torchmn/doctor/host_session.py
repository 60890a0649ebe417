"""The launcher's side of the program on one host."""

import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

from torchmn.base.errors import LaunchError
from torchmn.control.codec import Record, decode_union, encode
from torchmn.control.processes import lower_in_child
from torchmn.doctor.findings import AskTime, Begin, Failed, Ready, TimeIs
from torchmn.run.starters.remote import to_host

_NUM_CLOCK_ROUNDS = 7
_CLOCK_S = 5.0
_CHUNK_BYTES = 1 << 16

Reply = TypeVar("Reply", bound=Record)


class HostSession:
    """Starts the program on a host and sends it orders, one at a time.

    A host that does not answer in time is given up: all later calls raise.
    """

    def __init__(self, begin: Begin, env: Mapping[str, str], limit_s: float) -> None:
        """Raises LaunchError: the program did not start within the limit."""
        self.host = begin.host
        self._received = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        # Not pipes: a host that reads no orders fills either, and sockets have time limits.
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                to_host(env, begin.host, "torchmn.doctor.host_main"),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                env=dict(env),
                preexec_fn=lower_in_child(),
            )
        except OSError as error:
            self._socket.close()
            raise LaunchError(f"the remote shell cannot be run: {error}") from None
        finally:
            theirs.close()
        try:
            ready = self.call(begin, Ready, limit_s)
        except LaunchError:
            self.close()
            raise
        self.machine, self.port = ready.machine, ready.port

    def call(self, order: Record, kind: type[Reply], limit_s: float) -> Reply:
        """Send an order and return its reply. Raises LaunchError: no reply, or the order failed."""
        deadline = time.monotonic() + limit_s
        try:
            self._send(encode(order), limit_s)
            while True:
                line = self._read_line(deadline)
                with suppress(ValueError):  # a shell may greet before the program starts
                    reply = decode_union(line, kind | Failed)
                    break
        except LaunchError:
            self.close()
            raise
        if isinstance(reply, Failed):
            raise LaunchError(reply.text)
        return reply  # type: ignore[no-any-return]

    def clock_offset_s(self) -> tuple[float, float]:
        """Return the seconds by which the host's clock is ahead, and their error.

        Of several round trips the quickest counts. Raises LaunchError.
        """
        best = (0.0, float("inf"))
        for _ in range(_NUM_CLOCK_ROUNDS):
            sent = time.time()
            found = self.call(AskTime(), TimeIs, _CLOCK_S).unix_s
            back = time.time()
            if (back - sent) / 2 < best[1]:
                best = found - (sent + back) / 2, (back - sent) / 2
        return best

    @property
    def is_closed(self) -> bool:
        """Whether the host was given up."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Close the program's standard input, at which it exits, or kill it."""
        self._socket.close()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def kill(self) -> None:
        """Kill the remote shell, which also ends a call in another thread."""
        self._process.kill()

    def _send(self, line: bytes, limit_s: float) -> None:
        if self.is_closed:
            raise LaunchError("it was given up before")
        self._socket.settimeout(limit_s)
        try:
            self._socket.sendall(line)
        except TimeoutError:
            raise LaunchError("it reads no orders") from None
        except OSError:
            raise LaunchError(self._last_error()) from None

    def _read_line(self, deadline: float) -> bytes:
        while b"\n" not in self._received:
            # 0 would not be a limit, but make the socket non-blocking.
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except TimeoutError:
                raise LaunchError("it did not answer in time") from None
            except OSError:  # it has ended with orders that it did not read
                chunk = b""
            if not chunk:
                raise LaunchError(self._last_error())
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _last_error(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it exited with {self._process.poll()}"
