"""Ends all ranks within seconds when one fails or hangs, under any launcher.

Under ``torchmn run`` the agents do this: each is the parent of a rank. Other launchers may end a
job when a rank dies, or not (``srun`` without ``--kill-on-bad-exit``), and none of them sees an
exception of one rank for which the others wait. So each rank starts a process that monitors it
(`torchmn.monitor.rank_monitor`), and rank 0 the server that they connect to
(`torchmn.monitor.server`).

After ChainerMN's ``global_except_hook.add_hook()``, which handled exceptions of the main thread
only and called ``MPI_Abort``.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess

from torchmn.communicators import Communicator
from torchmn.control.codec import Record, encode
from torchmn.control.processes import python_module
from torchmn.environment_variables import SECRET_VARIABLE
from torchmn.errors import CommunicationError
from torchmn.monitor import rank_monitor, script_monitor, server
from torchmn.monitor.job_result import LOG_DIR, run_name
from torchmn.topology import route_to


def install_crash_handler(comm: Communicator, *, grace_s: float = 5.0) -> None:
    """End all ranks when one fails or hangs, and report which rank and why. *Collective.*

    Call it once, after `create_communicator`. Under ``torchmn run`` scripts are monitored already
    and it does nothing, except in a script that a command other than Python has started: there it
    connects to the rank's agent. Under other launchers it starts the monitors, replaces
    `sys.excepthook` and `sys.exit` and registers a function with `atexit`. The report is printed
    last, on rank 0's host, and written to ``torchmn-logs/<date>-<process>/failure.txt`` (and
    ``hang.txt``) there.

    Args:
        comm: all ranks of the job.
        grace_s: seconds between asking a rank to end and killing it.

    Raises CommunicationError on all ranks: the monitor server could not be started.
    """
    monitor = script_monitor.current()
    if monitor is None and (monitor := script_monitor.install_from_environment(os.environ)):
        script_monitor.install_exit_hooks(monitor)
        monitor.follow(comm.flight_recorder)
    if any(comm.allgather_obj(monitor is not None)) or comm.size == 1:
        return
    secret, address, problem = "", "", ""
    if comm.rank == 0:
        secret = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)
        try:
            address = _start_server(comm, secret)
        except OSError as error:
            problem = f"{comm.rank_label}: the monitor server did not start: {error}"
    secret, address, problem = comm.bcast_obj((secret, address, problem))
    if problem:
        raise CommunicationError(problem)
    own, other = socket.socketpair()
    order = rank_monitor.Order(
        rank=comm.rank,
        pid=os.getpid(),
        server=address,
        secret=secret,
        grace_s=grace_s,
        descriptor=other.fileno(),
    )
    _start("torchmn.monitor.rank_monitor", order, stdout=subprocess.DEVNULL, keep=(other.fileno(),))
    other.close()
    monitor = script_monitor.install(own)
    script_monitor.install_exit_hooks(monitor)
    monitor.follow(comm.flight_recorder)


def _start_server(comm: Communicator, secret: str) -> str:
    """Start it on the interface towards the other hosts; its address. Raises OSError."""
    others = [name for name in comm.topology.hosts if name != comm.host]
    routes = [route for name in others if (route := route_to(name)) is not None]
    if others and not routes:
        raise OSError(f"no route from this host to {others[0]}, so its ranks could not connect")
    log_dir = LOG_DIR / run_name()
    order = server.Order(
        address=routes[0].address if routes else "127.0.0.1",
        secret=secret,
        num_ranks=comm.size,
        log_dir=str(log_dir.absolute()),
    )
    process = _start("torchmn.monitor.server", order, stdout=subprocess.PIPE)
    address = ""
    if process.stdout is not None:
        with process.stdout as answer:
            address = answer.readline().decode().strip()
    if not address:
        raise OSError(f"it cannot listen on {order.address}")
    return address


def _start(
    module: str, order: Record, *, stdout: int, keep: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start one of torchmn's programs in its own session, which outlives the script a little."""
    process = subprocess.Popen(
        python_module(module),
        stdin=subprocess.PIPE,
        stdout=stdout,
        start_new_session=True,
        pass_fds=keep,
    )
    if process.stdin is not None:
        with process.stdin:
            process.stdin.write(encode(order))
    process.returncode = 0  # it is not waited for: without it Popen would warn
    return process
