"""Find out whether the process at the other end of a connection still runs.

The end of a connection tells that a process is dead, and the kernel of its host that the host is
up. A process that is stopped is neither: it has to be asked. At most one question is open, so that
nothing piles up at a process that does not read.
"""

import os
import time
from collections.abc import Iterable

from torchmn.base.errors import UsageError
from torchmn.cluster.environment_variables import HEARTBEAT_VARIABLE
from torchmn.control.connection import Channel
from torchmn.control.messages import Alive, HeartbeatRequest, StoppedProcess
from torchmn.control.processes import ancestors, children, is_stopped, process_name

_DEFAULT_LIMIT_S = 30.0
_PERIODS_PER_LIMIT = 15


def heartbeat_limit_s() -> float:
    """Return how many seconds a process may be stopped or silent. Raises UsageError."""
    text = os.environ.get(HEARTBEAT_VARIABLE, "") or str(_DEFAULT_LIMIT_S)
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = -1.0
    if not limit_s > 0:
        raise UsageError(f"{HEARTBEAT_VARIABLE}={text!r} must be a positive number of seconds.")
    return limit_s


class Heartbeat:
    """Asks one peer periodically. ``now`` is the time of the same `LoopClock` in all calls."""

    def __init__(self, channel: Channel) -> None:
        self.limit_s = heartbeat_limit_s()
        self._channel = channel
        self._asked_at: float | None = None
        self._ask_at = 0.0

    def silent_s(self, now: float) -> float:
        """Ask the peer if that is due; return for how many seconds it has not answered."""
        # A second question would not be answered earlier, and would fill the peer's buffer.
        if self._asked_at is not None:
            return now - self._asked_at
        if now >= self._ask_at:
            self._asked_at, self._ask_at = now, now + self.limit_s / _PERIODS_PER_LIMIT
            self._channel.post(HeartbeatRequest())
        return 0.0

    def answered(self) -> None:
        """Note that the peer has answered."""
        self._asked_at = None


def answer(
    channel: Channel, *pids: int, sees_launcher: bool = False, place: tuple[int, int] = (0, 1)
) -> None:
    """Answer a request, and report which of these processes are stopped.

    With ``sees_launcher`` it also looks at the ancestors of this process, and at its share of its
    siblings: ``place`` is (local rank, number of ranks on this host).
    """
    watched = dict.fromkeys(pid for pid in pids if pid)
    if sees_launcher:
        # mpirun, srun or a shell: one that is stopped passes neither output nor ends of ranks on,
        # and the ranks below it run as if nothing had happened.
        above = ancestors(os.getpid())
        beside = share_of(children(above[0]), *place) if above else []
        watched |= dict.fromkeys([*beside, *above])
    stopped = [StoppedProcess(pid, process_name(pid)) for pid in watched if is_stopped(pid)]
    channel.post(Alive(stopped=stopped))


def share_of(pids: Iterable[int], index: int, num: int) -> list[int]:
    """Return the processes that observer ``index`` of ``num`` looks at.

    Two observers look at each process, since a process that is stopped may be an observer itself.
    If all looked at all, many ranks on one host would do little else.
    """
    return [pid for i, pid in enumerate(sorted(pids)) if (i - index) % num < 2]


_MAX_TICK_S = 1.0


class LoopClock:
    """Monotonic seconds, advanced by `tick` in every turn of a loop, by at most a second.

    A process that was stopped, or whose machine was suspended, has not seen what others sent in the
    meantime: they must not be late by its own pause.
    """

    def __init__(self) -> None:
        self.now = self._ticked_at = time.monotonic()

    def tick(self) -> float:
        """Advance the clock and return the new time."""
        before, self._ticked_at = self._ticked_at, time.monotonic()
        self.now += min(self._ticked_at - before, _MAX_TICK_S)
        return self.now
