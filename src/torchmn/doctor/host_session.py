"""The launcher's side of the program on one host."""

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, TypeVar

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
        try:
            self._process = subprocess.Popen(
                to_host(env, begin.host, "torchmn.doctor.host_main"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=dict(env),
                bufsize=0,
                preexec_fn=lower_in_child(),
            )
        except OSError as error:
            raise LaunchError(f"the remote shell cannot be run: {error}") from None
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
            self._write(encode(order), deadline)
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
        return self._process.stdin is None or self._process.stdin.closed

    def close(self) -> None:
        """Close the program's standard input, at which it exits, or kill it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def kill(self) -> None:
        """Kill the remote shell, which also ends a call in another thread."""
        self._process.kill()

    def _write(self, line: bytes, deadline: float) -> None:
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            raise LaunchError("it was given up before")
        # A host that reads no orders fills the pipe: this must not block beyond the deadline.
        os.set_blocking(pipe.fileno(), False)
        view = memoryview(line)
        while view:
            if not _is_ready(pipe, select.POLLOUT, deadline):
                raise LaunchError("it reads no orders")
            try:
                view = view[os.write(pipe.fileno(), view) :]
            except BlockingIOError:
                continue
            except OSError:
                raise LaunchError(self._last_error()) from None

    def _read_line(self, deadline: float) -> bytes:
        pipe = self._process.stdout
        if pipe is None or pipe.closed:
            raise LaunchError("it was given up before")
        while b"\n" not in self._received:
            if not _is_ready(pipe, select.POLLIN, deadline):
                raise LaunchError("it did not answer in time")
            chunk = os.read(pipe.fileno(), _CHUNK_BYTES)
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


def _is_ready(pipe: IO[bytes], event: int, deadline: float) -> bool:
    poll = select.poll()  # select() supports only the first 1024 descriptors
    poll.register(pipe, event)
    return bool(poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))))
