"""Everybody dies in seconds, with the guilty rank's words last: under any launcher.

Under ``torchmn run`` this is always so, for an agent is the parent of every rank. Other launchers
end a job at a rank's death or do not (``srun`` without ``--kill-on-bad-exit``), and none of them
knows of an exception that one rank meets while the others wait for it. So each rank starts a
sentinel beside itself, and rank 0 a hub that hears all sentinels (`torchmn.monitor.rank_monitor`,
`torchmn.monitor.server`).

After ChainerMN's ``global_except_hook.add_hook()`` (ancestors 1.11), which saw exceptions of the
main thread only and called MPI_Abort.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import time
from pathlib import Path

from torchmn.communicators import Communicator
from torchmn.control.processes import python_module
from torchmn.errors import CommunicationError
from torchmn.monitor import script_monitor
from torchmn.topology import route_to

_START_S = 30.0


def install_crash_handler(comm: Communicator, *, grace_s: float = 5.0) -> None:
    """End all ranks when one fails or hangs, and say which one and why. *Collective.*

    Call it once, behind `create_communicator`. Under ``torchmn run`` the job is watched already
    and nothing is done. What ended the job is printed last, by rank 0's host, and kept in
    ``torchmn-logs/<date>-<process>/failure.txt`` (and ``hang.txt``) there.

    Args:
        comm: all ranks of the job.
        grace_s: how long a rank may take to end before it is killed, in seconds.

    Raises CommunicationError on all ranks: the hub could not be started.
    """
    is_watched = script_monitor.of_this_process() is not None
    if any(comm.allgather_obj(is_watched)) or comm.size == 1:
        return
    secret, hub, problem = "", "", ""
    if comm.rank == 0:
        secret = os.environ.get("TORCHMN_SECRET") or secrets.token_hex(32)
        try:
            hub = _start_hub(comm, secret)
        except OSError as error:
            problem = f"{comm.rank_label}: the hub of the crash handler did not start: {error}"
    secret, hub, problem = comm.bcast_obj((secret, hub, problem))
    if problem:
        raise CommunicationError(problem)
    own, others = socket.socketpair()
    order = {
        "rank": comm.rank,
        "pid": os.getpid(),
        "hub": hub,
        "secret": secret,
        "grace_s": grace_s,
        "descriptor": others.fileno(),
    }
    _start(
        "torchmn.monitor.rank_monitor", order, stdout=subprocess.DEVNULL, keep=(others.fileno(),)
    )
    others.close()
    script_monitor.watch_over(own).follow(comm.flight_recorder)


def _start_hub(comm: Communicator, secret: str) -> str:
    """Start it on the interface that leads to the other hosts; its address."""
    others = [name for name in comm.topology.hosts if name != comm.host]
    routes = [route for name in others if (route := route_to(name)) is not None]
    if others and not routes:
        raise OSError(
            f"this host knows no way to {others[0]}, by that name; the ranks there could not reach "
            "the hub"
        )
    log_dir = Path("torchmn-logs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    order = {
        "address": routes[0].address if routes else "127.0.0.1",
        "secret": secret,
        "size": comm.size,
        "log_dir": str(log_dir.absolute()),
    }
    process = _start("torchmn.monitor.server", order, stdout=subprocess.PIPE)
    address = ""
    if process.stdout is not None:
        with process.stdout as answer:
            address = answer.readline().decode().strip()
    if not address:
        raise OSError(f"it cannot listen on {order['address']}")
    return address


def _start(
    module: str, order: dict[str, object], *, stdout: int, keep: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start one of our programs in a session of its own, which outlives the script a little."""
    process = subprocess.Popen(
        python_module(module),
        stdin=subprocess.PIPE,
        stdout=stdout,
        start_new_session=True,
        pass_fds=keep,
    )
    if process.stdin is not None:
        with process.stdin:
            process.stdin.write(json.dumps(order).encode() + b"\n")
    process.returncode = 0  # nobody waits for it: without it Popen would warn
    return process
