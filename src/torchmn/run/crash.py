"""Ends all ranks within seconds when one fails or hangs, under any launcher.

Under ``torchmn run`` the agents do this: each is the parent of a rank. Other launchers may end a
job when a rank dies, or not (``srun`` without ``--kill-on-bad-exit``), and none of them sees an
exception of one rank for which the others wait. So each rank starts a process that monitors it
(`torchmn.run.monitor.rank_monitor`), and rank 0 the server that they connect to
(`torchmn.run.monitor.server`).

After ChainerMN's ``global_except_hook.add_hook()``, which handled exceptions of the main thread
only and called ``MPI_Abort``.
"""

import json
import os
import secrets
import socket
import subprocess
from collections.abc import Sequence

from torchmn.base.errors import CommunicationError, TimeLimitError
from torchmn.base.torch_private import PrefixStore
from torchmn.cluster.environment_variables import SECRET_VARIABLE
from torchmn.cluster.launcher_env import LauncherInfo
from torchmn.cluster.network import route_to
from torchmn.comm import Communicator
from torchmn.comm.transports.join import meet
from torchmn.comm.transports.own_rank import own_place
from torchmn.control.codec import Record, encode
from torchmn.control.processes import python_module
from torchmn.run.monitor import rank_monitor, script_monitor, server
from torchmn.run.monitor.job_result import LOG_DIR, run_name

# How long ranks wait for each other without a communicator, as in `create_communicator`.
_MEET_S = 300.0


def install_crash_handler(comm: Communicator | None = None, *, grace_s: float = 5.0) -> None:
    """End all ranks when one fails or hangs, and report which rank and why. *Collective.*

    Call it once: at the beginning of the script without ``comm``, or after `create_communicator`.
    Under ``torchmn run`` scripts are monitored already and it does nothing, except in a script that
    a command other than Python has started: there it connects to the rank's agent. Under other
    launchers it starts the monitors, replaces `sys.excepthook` and `sys.exit` and registers a
    function with `atexit`. The report is printed last, on rank 0's host, and written to
    ``torchmn-logs/<date>-<time>-<process>/failure.txt`` (and ``hang.txt``) there.

    Args:
        comm: all ranks of the job. Without it the ranks meet as in `create_communicator` with
            gloo, so that failures before that are reported as well.
        grace_s: seconds between asking a rank to end and killing it.

    Raises CommunicationError on all ranks: the monitor server could not be started. Without
    ``comm`` also what `create_communicator` raises when ranks do not meet.

    >>> from torchmn.run import install_crash_handler
    >>> install_crash_handler(comm)  # nothing to do for a rank that is alone
    """
    monitor = script_monitor.current()
    if monitor is None and (monitor := script_monitor.install_from_environment(os.environ)):
        script_monitor.install_exit_hooks(monitor)
        if comm is not None:
            monitor.collectives(comm.flight_recorder)
    if comm is None:
        launched = own_place()
        if monitor is None and launched is not None and launched.size > 1:
            _monitor(launched.rank, *_server_through_store(launched), grace_s)
        return
    # All ranks must decide alike: the broadcast below needs every one of them.
    if any(comm.allgather_obj(monitor is not None)) or comm.size == 1:
        return
    found = _start_server(comm.topology.hosts) if comm.rank == 0 else None
    secret, address, problem = comm.bcast_obj(found)
    _monitor(comm.rank, secret, address, problem, grace_s)
    if monitor := script_monitor.current():
        monitor.collectives(comm.flight_recorder)


def _server_through_store(launched: LauncherInfo) -> tuple[str, str, str]:
    """Start the server on rank 0; the other ranks read its address from the ranks' store.

    Returns what `_start_server` returns. *Collective.* Raises TimeLimitError: ranks are missing.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives it
    store = PrefixStore(f"torchmn crash handler {attempt}", meet(launched, _MEET_S)[1])
    try:
        if launched.rank > 0:
            store.set(f"host {launched.rank}", socket.gethostname())
            secret, address, problem = json.loads(store.get("server"))
            return secret, address, problem
        hosts = [bytes(store.get(f"host {rank}")).decode() for rank in range(1, launched.size)]
        found = _start_server([socket.gethostname(), *hosts])
        store.set("server", json.dumps(found))
    except RuntimeError as error:
        raise TimeLimitError(
            f"Rank {launched.rank} of {launched.size} on {socket.gethostname()}: not all ranks "
            f"called install_crash_handler() within {_MEET_S:g} s "
            f"({str(error).splitlines()[0]})."
        ) from error
    return found


def _monitor(rank: int, secret: str, address: str, problem: str, grace_s: float) -> None:
    """Start the monitor of this rank, which connects to the server. Raises CommunicationError."""
    if problem:
        raise CommunicationError(problem)
    own, other = socket.socketpair()
    order = rank_monitor.Order(
        rank=rank,
        pid=os.getpid(),
        server=address,
        secret=secret,
        grace_s=grace_s,
        descriptor=other.fileno(),
    )
    _start(
        "torchmn.run.monitor.rank_monitor", order, stdout=subprocess.DEVNULL, keep=(other.fileno(),)
    )
    other.close()  # only the monitor holds it now, so that its death closes the connection
    script_monitor.install_exit_hooks(script_monitor.install(own))


def _start_server(hosts: Sequence[str]) -> tuple[str, str, str]:
    """Start the monitor server on the interface towards the other ranks' hosts.

    ``hosts`` has the host of each rank. Returns the server's secret, its address, and the reason if
    it did not start (else an empty string).
    """
    secret = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)
    others = [name for name in hosts if name != hosts[0]]
    routes = [route for name in others if (route := route_to(name)) is not None]
    failed = f"Rank 0 on {hosts[0]}: the monitor server did not start:"
    if others and not routes:
        no_route = f"no route from this host to {others[0]}, so its ranks could not connect"
        return "", "", f"{failed} {no_route}"
    order = server.Order(
        address=routes[0].address if routes else "127.0.0.1",
        secret=secret,
        num_ranks=len(hosts),
        log_dir=str((LOG_DIR / run_name()).absolute()),
    )
    address = reason = ""
    try:
        process = _start("torchmn.run.monitor.server", order, stdout=subprocess.PIPE)
        if process.stdout is not None:
            with process.stdout as answer:
                address = answer.readline().decode().strip()
                reason = "" if address else answer.read().decode().strip()
    except OSError as error:
        return "", "", f"{failed} {error}"
    reason = reason or f"it cannot listen on {order.address}"
    return secret, address, "" if address else f"{failed} {reason}"


def _start(
    module: str, order: Record, *, stdout: int, keep: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start one of torchmn's programs in its own session, since it must outlive the script."""
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
