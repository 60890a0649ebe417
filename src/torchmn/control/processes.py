"""What Linux offers so that no process outlives its job; elsewhere groups of processes must do.

A parent's death reaches only its children, and only with a signal that they asked for. A process
that adopts orphans (a *subreaper*) stays the ancestor of everything that was started below it,
whatever sessions and groups the processes made for themselves, and so can end all of it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

IS_LINUX = sys.platform.startswith("linux")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies. Linux only, else nothing."""
    if IS_LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_on_parent_death(signum: int = signal.SIGKILL) -> Callable[[], None] | None:
    """For ``preexec_fn``: the child gets ``signum`` when the thread that started it ends.

    ``None`` where the system has no such thing.
    """
    if not IS_LINUX:
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # loaded before the fork
    parent = os.getpid()

    def ask_for_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(128 + signum)

    return ask_for_signal


def descendants(pid: int) -> list[int]:
    """The living processes below ``pid``, children before grandchildren. Linux only, else []."""
    children: dict[int, list[int]] = {}
    if not IS_LINUX:
        return []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
            # the name in brackets may hold anything, so read behind the last bracket
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level
    return found


_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk or another device",
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
}

HALTED = (
    "waits for a disk",
    "is stopped",
    "has ended",
    "is gone",
    "is lost",
    "has come to the end",
)
"""In the words for a process that will not go on by itself."""


def state_of(pid: int) -> str:
    """What a process does, in words; empty where the system does not tell. Linux only."""
    if not IS_LINUX:
        return ""
    letter = _state_letter(pid)
    if not letter:
        return "is gone"
    place = ""
    with suppress(OSError), open(f"/proc/{pid}/wchan") as wchan:
        place = wchan.read().strip().strip("0")
    return _STATES.get(letter, f"is in state {letter}") + (f" (in {place})" if place else "")


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process. Linux only, else no."""
    return IS_LINUX and _state_letter(pid) in ("T", "t")


def is_running(pid: int) -> bool:
    """Whether the process is there and has not ended; one of our user, or we may not ask."""
    if IS_LINUX:
        return _state_letter(pid) not in ("", "Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def zombie_returncode(pid: int) -> int | None:
    """How a process ended whose parent has not asked yet, as `os.waitpid` says it. Linux only."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        if fields[0] == b"Z":
            return os.waitstatus_to_exitcode(int(fields[49]))
    return None


def _state_letter(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""


def send(pid: int, signum: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def send_group(pid: int, signum: int) -> None:
    """Send a signal to the process group that ``pid`` leads or led."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def kill_descendants(pid: int, *, spare: Collection[int] = (), limit_s: float = 5.0) -> None:
    """SIGKILL everything below ``pid`` but ``spare`` and what is below it, until nothing is left.

    Repeats, since a process may fork between the look and the blow. Reaps nothing.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        spared = {child for root in spare for child in (root, *descendants(root))}
        alive = [child for child in descendants(pid) if child not in spared]
        if not alive:
            return
        for child in alive:
            send(child, signal.SIGKILL)
        time.sleep(0.01)


def reap_children() -> list[tuple[int, int]]:
    """Collect the children that have ended: (process, exit code or minus the signal)."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def signal_name(returncode: int) -> str | None:
    """``SIGKILL`` for -9, ``None`` for a process that ended by itself."""
    if returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def signal_socket(*signums: signal.Signals) -> socket.socket:
    """Turn these signals into bytes, their numbers, that can be read from the returned socket."""
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    for signum in signums:
        signal.signal(signum, lambda *_: None)
    return reading


def python_module(module: str) -> tuple[str, ...]:
    """The command of one of our own modules.

    ``-P`` where Python has it: the user's folder must not shadow modules that ours import.
    """
    safe_path = ("-P",) if sys.version_info >= (3, 11) else ()
    return (sys.executable, *safe_path, "-m", module)
