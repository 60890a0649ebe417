"""A job seen from outside: its processes, and its output with times."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

MARK = "TORCHMN_CHAOS_MARK"
SCRIPT = "chaos/training.py"
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK")
_PERIOD_S = 0.03


class Starter(Protocol):
    """Starts a command on the machine, or on a test host."""

    def __call__(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None,
        cwd: str | Path | None,
        stdout: int,
        stderr: int,
    ) -> subprocess.Popen[str]: ...


@dataclass(frozen=True)
class Line:
    """A line of the output and the time it was read (monotonic)."""

    at: float
    text: str


class Job:
    """One started job. All processes in ``networks``, those of its test hosts, belong to it."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        start: Starter,
        env: Mapping[str, str],
        folder: Path,
        mark: str,
        networks: Collection[str] = (),
    ) -> None:
        self._mark = f"{MARK}={mark}".encode()
        self._networks = frozenset(networks)
        self._bystanders = frozenset(_on_networks(self._networks))
        self._known: list[int] = []
        self.lines: list[Line] = []
        self._is_closed = threading.Event()
        self.started_at = time.monotonic()
        self.process = start(
            command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, pipe: IO[str]) -> None:
        rest = b""
        with pipe:
            while not self._is_closed.is_set():
                if not select.select([pipe], [], [], 0.05)[0]:
                    continue
                if not (chunk := os.read(pipe.fileno(), 1 << 16)):
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                now = time.monotonic()
                self.lines += [Line(now, line.decode(errors="replace")) for line in lines]
        if rest:
            self.lines.append(Line(time.monotonic(), rest.decode(errors="replace")))

    def close_output(self) -> None:
        """Close the reading end of its output: what it prints next fails."""
        self._is_closed.set()
        self._reader.join()

    @property
    def text(self) -> str:
        """The output so far."""
        return "\n".join(line.text for line in self.lines)

    def has_processes(self) -> bool:
        """Whether a process of the job is alive. Searches for others when no known one is left."""
        self.process.poll()  # otherwise it would remain a zombie
        self._known = [pid for pid in self._known if _is_alive(pid)] or self.processes()
        return bool(self._known)

    def processes(self) -> list[int]:
        """Every living process of the job, on every host."""
        found = [pid for pid in _all_pids() if self._mark in _environment(pid).split(b"\0")]
        found += [pid for pid in _on_networks(self._networks) if pid not in self._bystanders]
        if self.process.poll() is None:
            found.append(self.process.pid)
        return sorted({pid for pid in found if _is_alive(pid)})

    def pid_of(self, rank: int) -> int | None:
        """The process of a rank's script, or None if it has not started."""
        for pid in _all_pids():
            variables = _environment(pid).split(b"\0")
            is_script = any(arg.endswith(SCRIPT) for arg in _arguments(pid)[1:3])
            if self._mark not in variables or not is_script:
                continue
            if any(f"{name}={rank}".encode() in variables for name in _RANK_VARIABLES):
                return pid
        return None

    def wait_for_pid(self, rank: int, limit_s: float) -> int:
        """Wait for `pid_of`. Raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        while (pid := self.pid_of(rank)) is None:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"rank {rank} did not start")
            time.sleep(0.02)
        return pid

    def wait_until_gone(self, limit_s: float) -> float | None:
        """The time when the last process ended (monotonic); None if the limit has passed."""
        deadline = time.monotonic() + limit_s
        gone_at: float | None = None
        while True:  # checked twice: a process in exec has no environment for a moment
            if self.has_processes():
                gone_at = None
            elif gone_at is not None:
                break
            else:
                gone_at = time.monotonic()
            if time.monotonic() > deadline:
                return None
            time.sleep(_PERIOD_S)
        self.process.wait(5)
        self._reader.join(5)
        return gone_at

    def kill_all(self) -> None:
        """Kill all processes that are left."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait_until_gone(5)

    def describe(self, pids: Collection[int]) -> list[str]:
        """State and command line of processes, for the record."""
        return [f"{pid} {_state(pid)} {' '.join(_arguments(pid))[:200]}" for pid in pids]


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has ended
        return b""


def _environment(pid: int) -> bytes:
    return _read_bytes(f"/proc/{pid}/environ")


def _arguments(pid: int) -> list[str]:
    return _read_bytes(f"/proc/{pid}/cmdline").decode(errors="replace").split("\0")[:-1] or [""]


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if it is gone."""
    return int((_stat(pid) or ["", "0"])[1])


def children_of(pid: int) -> list[int]:
    """The living children of a process."""
    return [child for child in _all_pids() if parent_of(child) == pid and _is_alive(child)]


def _stat(pid: int) -> list[str]:
    return _read_bytes(f"/proc/{pid}/stat").decode(errors="replace").rpartition(") ")[2].split()


def _state(pid: int) -> str:
    return "".join(_stat(pid)[:1])


def _is_alive(pid: int) -> bool:
    return _state(pid) not in ("", "Z", "X")


def _on_networks(networks: Collection[str]) -> list[int]:
    if not networks:
        return []
    found = []
    for pid in _all_pids():
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/net") in networks:
                found.append(pid)
    return found
