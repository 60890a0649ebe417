"""Enforce a time limit on `MPI_Init`, which waits for all ranks without a limit of its own.

Importing mpi4py holds the interpreter meanwhile, so that no thread of the script can watch it.
Under ``torchmn run`` the agent does (`Joining`). Elsewhere this module is also a program,
``python -m torchmn.control.mpi_start``: a process beside the script, which ends when `MPI_Init` has
returned, and after the limit reports what it sees and kills the script. Its `Order` is a line on
standard input, whose end means that it is no longer needed.
"""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torchmn.base import events
from torchmn.base.errors import TopologyError
from torchmn.base.terminal import say
from torchmn.cluster.launcher_env import read_launcher_env
from torchmn.cluster.units import grouped
from torchmn.control.codec import Record, decode, encode
from torchmn.control.heartbeat import LoopClock
from torchmn.control.processes import (
    ancestors,
    descendants,
    environment_of,
    is_stopped,
    python_module,
    send,
)

_PERIOD_S = 0.2


class Order(Record, frozen=True, kw_only=True):
    """Process and rank of the script, and how many seconds it may spend in `MPI_Init`."""

    pid: int
    rank: int
    limit_s: float


@contextmanager
def limited_mpi_start(limit_s: float) -> Iterator[None]:
    """Kill this process if the block, which calls `MPI_Init`, exceeds the limit. Local."""
    launched = read_launcher_env(os.environ)
    has_other_limit = (
        any(each.ends_lost_ranks for each in events.observers) or "mpi4py.MPI" in sys.modules
    )
    if launched is None or launched.known_size == 1 or has_other_limit:
        yield
        return
    order = Order(pid=os.getpid(), rank=launched.rank, limit_s=limit_s)
    with subprocess.Popen(
        python_module(__name__),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # Signals to the script's group are not for it, also while it starts.
        start_new_session=True,
    ) as watch:
        try:
            if watch.stdin is not None:
                watch.stdin.write(encode(order))
                watch.stdin.flush()
            yield
        finally:
            watch.kill()


def main() -> int:
    """Read the order, and kill the script unless standard input ends within the limit."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # meant for the script
    order = decode(sys.stdin.readline(), Order)
    clock = LoopClock()
    waited_s, before = 0.0, clock.now
    while waited_s < order.limit_s:
        if select.select([sys.stdin], [], [], _PERIOD_S)[0]:
            return 0
        now = clock.tick()
        if not is_stopped(order.pid):  # the limit does not run while the script is suspended
            waited_s += now - before
        before = now
    say(
        f"rank {order.rank} on {socket.gethostname()}: MPI_Init, which waits for all "
        f"ranks, has not returned within {order.limit_s:g} s (Timeout.first_s): "
        f"{_describe(_ranks_beside(order.pid))}. This rank is killed."
    )
    send(order.pid, signal.SIGKILL)
    return 1


def _describe(ranks: Mapping[int, list[int]]) -> str:
    stopped = [(rank, pid) for rank, pids in ranks.items() for pid in pids if is_stopped(pid)]
    if stopped:
        names = [f"rank {rank} (process {pid})" for rank, pid in stopped]
        return f"{', '.join(names)} on this host is stopped by a signal"
    numbers = ", ".join(str(rank) for rank in sorted(ranks))
    return (
        f"the ranks that run on this host are {numbers}; another one has ended, is stopped, has "
        "not started, or has not called create_communicator()"
    )


def _ranks_beside(pid: int) -> dict[int, list[int]]:
    """Return the ranks of this host and their processes, found below what started them."""
    above = [parent for parent in ancestors(pid) if _rank_of(parent) is None]
    processes = descendants(above[0]) if above else [pid]
    return grouped((rank, each) for each in processes if (rank := _rank_of(each)) is not None)


def _rank_of(pid: int) -> int | None:
    try:
        launched = read_launcher_env(environment_of(pid))
    except TopologyError:
        return None
    return None if launched is None else launched.rank


if __name__ == "__main__":
    sys.exit(main())
