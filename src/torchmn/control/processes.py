"""Linux process control, so that no process outlives its job.

The death of a parent reaches only its children, and only as a signal that they asked for. A process
that adopts orphans (a *subreaper*) stays the ancestor of everything that was started below it,
whatever sessions and groups those processes make, and so can end all of them.
"""

import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from torchmn.base.errors import LaunchError
from torchmn.control.messages import ProcessState

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_STATES = {letter: state for state in ProcessState for letter in state.letters}


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_on_parent_death(
    signum: int = signal.SIGKILL, *, blocked: Collection[signal.Signals] = ()
) -> Callable[[], None]:
    """Return a ``preexec_fn`` by which the child gets ``signum`` when its starting thread ends.

    Signals in ``blocked`` wait until the child unblocks them.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # loaded before the fork
    parent = os.getpid()

    def request_signal() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != parent:  # it died before the request
            os._exit(128 + signum)

    return request_signal


def descendants(pid: int) -> list[int]:
    """Return the living processes below ``pid``, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))) and fields[0] not in ("Z", "X"):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level
    return found


def children(pid: int) -> list[int]:
    """Return the children of a process, whichever of its threads has started them."""
    found: list[int] = []
    with suppress(OSError):  # it ends
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(pid, f"task/{thread}/children").split())
    return found


def ancestors(pid: int) -> list[int]:
    """Return the parent of a process, the parent's parent, and so on."""
    found: list[int] = []
    while (fields := _stat(pid)) and int(fields[1]) > 1:
        pid = int(fields[1])
        found.append(pid)
    return found


def process_name(pid: int) -> str:
    """Return the name of a process's program; empty if there is no such process."""
    return _read(pid, "comm").strip()


def command_of(pid: int) -> list[str]:
    """Return the command line of a process; empty if there is no such process."""
    return _read(pid, "cmdline").split("\0")[:-1]


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it cannot be read."""
    pairs = (text.partition("=") for text in _read(pid, "environ").split("\0") if text)
    return {name: value for name, _, value in pairs}


def files_of(pid: int) -> set[str]:
    """Return the paths of the files that a process has open; empty if it may not be looked at."""
    numbers, found = [], set[str]()
    with suppress(OSError):
        numbers = os.listdir(f"/proc/{pid}/fd")
    for number in numbers:
        with suppress(OSError):  # a thread of the process has closed it since it was listed
            found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found


def open_files(name: str) -> list[str]:
    """Return the paths of files with this name that processes of this user have open."""
    found = set[str]()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            if os.stat(f"/proc/{entry}").st_uid == os.geteuid():
                found |= files_of(int(entry))
    return sorted(path for path in found if os.path.basename(path) == name)


def resident_nbytes(pid: int) -> int:
    """Return the bytes of memory that a process has in RAM; 0 if they are unknown."""
    pages = _read(pid, "statm").split()[1:2]
    return int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def process_state(pid: int) -> tuple[ProcessState, str]:
    """Return the state of a process, and the kernel function in which it waits, if known."""
    kernel_function = _read(pid, "wchan").strip().strip("0")
    letter = _state_letter(pid)
    unknown = ProcessState.UNKNOWN if letter else ProcessState.GONE
    return _STATES.get(letter, unknown), kernel_function


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process."""
    return _state_letter(pid) == "T"


def is_running(pid: int) -> bool:
    """Whether the process exists and has not exited."""
    return _state_letter(pid) not in ("", "Z", "X")


def exists(pid: int) -> bool:
    """Whether the process runs, or has exited and was not reaped yet."""
    return bool(_state_letter(pid))


def expects_signal(pid: int, signum: int) -> bool:
    """Whether the process handles or ignores this signal."""
    masks = dict(line.split(":", 1) for line in _read(pid, "status").splitlines())
    # -1 has all bits set: a process that is gone "expects" any signal and need not be asked again.
    mask = int(masks.get("SigCgt", "-1"), 16) | int(masks.get("SigIgn", "-1"), 16)
    return bool(mask >> (signum - 1) & 1)


def start_time(pid: int) -> str:
    """Return when the process started, in clock ticks since boot; empty if it is gone."""
    return "".join(_stat(pid)[19:20])


def zombie_returncode(pid: int) -> int | None:
    """Return the return code of a process that has exited and was not reaped, else None."""
    fields = _stat(pid)
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[:1] == ["Z"] else None


def _state_letter(pid: int) -> str:
    return "".join(_stat(pid)[:1])


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; empty if there is no process."""
    # the name in brackets before them may hold anything, brackets too
    return _read(pid, "stat").rpartition(")")[2].split()


def _read(pid: int, name: str) -> str:
    """Read a file below ``/proc/PID``; empty if it does not exist or may not be read."""
    try:
        with open(f"/proc/{pid}/{name}", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def send(pid: int, signum: int) -> None:
    """Send a signal to a process that may have exited."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def send_group(pid: int, signum: int) -> None:
    """Send a signal to the process group that ``pid`` leads or led."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def kill_descendants(pid: int, *, spare: Collection[int] = (), limit_s: float = 5.0) -> None:
    """SIGKILL all processes below ``pid``, except ``spare`` and those below them.

    Repeats until none is left, since a process may fork in between. Reaps nothing.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        # Again in each turn: those that are spared may start processes as well.
        spared = {child for root in spare for child in (root, *descendants(root))}
        alive = [child for child in descendants(pid) if child not in spared]
        if not alive:
            return
        for child in alive:
            send(child, signal.SIGKILL)
        time.sleep(0.01)


def has_children() -> bool:
    """Whether this process has a child, be it one that has exited and was not reaped yet."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # WNOWAIT: reaps nothing
    except ChildProcessError:
        return False
    return True


def reap_children() -> list[tuple[int, int]]:
    """Reap children; return (process, exit code or minus the signal) for each."""
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
    """Return the signal that ended a process, as ``SIGKILL`` for -9, or None for an exit code."""
    if returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def signal_socket(*signums: signal.Signals) -> socket.socket:
    """Return a socket from which the numbers of these signals can be read, a byte for each."""
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    # Only signals with a Python handler are written to the descriptor, even if it does nothing.
    for signum in signums:
        signal.signal(signum, lambda *_: None)
    return reading


def python_module(module: str) -> tuple[str, ...]:
    """Return the command that runs one of torchmn's own modules.

    It has ``-P`` from Python 3.11 on, so that files in the user's folder shadow no modules.
    """
    safe_path = ("-P",) if sys.version_info >= (3, 11) else ()
    return (sys.executable, *safe_path, "-m", module)


P = TypeVar("P", bound=Hashable)


class StoppedProcesses(Generic[P]):
    """The processes that are stopped, with the time at which each was first seen stopped.

    ``now`` is the time of the same `LoopClock` in all calls.

    >>> stopped = StoppedProcesses[int]()
    >>> stopped.update([7, 8], now=0.0)
    >>> stopped.update([8], now=5.0)
    >>> stopped.update([7, 8], now=6.0)
    >>> stopped.for_longer_than(3.0, now=6.0)
    [8]
    """

    def __init__(self) -> None:
        self._since: dict[P, float] = {}

    def __iter__(self) -> Iterator[P]:
        return iter(self._since)

    def update(self, stopped: Iterable[P], now: float) -> None:
        """Record the processes that are stopped now; others have continued or ended."""
        self._since = {process: self._since.get(process, now) for process in stopped}

    def for_longer_than(self, limit_s: float, now: float) -> list[P]:
        """Return the processes that have been stopped for at least ``limit_s`` without a break."""
        return [process for process, since in self._since.items() if now - since >= limit_s]


# ---- how many files a process may have open (``ulimit -n``) -------------------------------------

_OTHER_FILES = 64  # standard streams, logs, listeners, pipes to processes that are being started
# The soft and the hard limit before the soft one was raised: at most one pair.
_given: list[tuple[int, int]] = []


def allow_connections(num_connections: int, what: str) -> None:
    """Raise the soft limit of open files to the hard one if this many connections need that.

    Only the process that is connected to all ranks calls this: scripts see the limit that the user
    has set. ``what`` names this process in the error. Raises LaunchError: the hard limit is too low
    as well.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"{what} needs {needed:,} open files, one for each of {num_connections:,} connections "
            f"and {_OTHER_FILES} others, and the hard limit of open files is {hard:,}. Raise it "
            "('nofile' in /etc/security/limits.conf, or the settings of the scheduler's or "
            "container's daemon; ulimit -Hn shows it), or use fewer ranks or hosts."
        )
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard)
    )
    if not _given:
        _given.append((soft, hard))


def lower_in_child() -> Callable[[], None] | None:
    """Return a ``preexec_fn`` that restores the limit from before `allow_connections`, or None."""
    return partial(resource.setrlimit, resource.RLIMIT_NOFILE, _given[0]) if _given else None
