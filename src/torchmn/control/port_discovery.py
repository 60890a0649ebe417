"""How ranks find rank 0's port when their launcher gives the host of rank 0, but no port.

With a fixed port, two jobs on one host would connect to each other. So rank 0 listens on a port
that the system chose, and publishes it on one of a few other ports that are derived from the name
of the job, which all its ranks know. It replies only to clients that know the name of the job, and
``TORCHMN_SECRET`` where that is set. The port itself is not secret: every user of the host can list
its sockets.
"""

from __future__ import annotations

import hashlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from torchmn.control.authenticated_listener import AuthenticatedListener, connect
from torchmn.errors import LaunchError, TopologyError
from torchmn.topology import LauncherInfo, allocation, route_of
from torchmn.topology.hostlists import parse_node_list

_NUM_PORTS = 8
_FIRST_PORT, _LAST_PORT = 20_000, 32_000  # below what systems give to connections
_LOOKUP_S = 2.0
_PAUSE_S = 0.05
_PORT = struct.Struct("!H")
_ROLE = "port discovery"
_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PALS_APID"),
    *("PBS_JOBID", "JOB_ID"),
)
"""The same for all ranks of one job step."""
_OF_ALL_STEPS = frozenset({"SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "JOB_ID"})


def job_name(env: Mapping[str, str]) -> str:
    """Identifies this job, and this step of it; empty if the environment does not.

    The scheduler's job ID alone is not enough: one job may start several worlds.
    """
    names = [name for name in _VARIABLES if env.get(name)]
    if _OF_ALL_STEPS.issuperset(names):
        return ""
    return " ".join(f"{name}={env[name]}" for name in names)


def leader_host(place: LauncherInfo, env: Mapping[str, str]) -> str | None:
    """The host of rank 0 according to the launcher or the scheduler, or ``None``.

    It is this host if all ranks run on one host. Ranks are assumed to follow the order of the list
    of hosts; where they do not, MASTER_ADDR must be set.
    """
    if place.inter_size == 1 or (place.intra_size is not None and place.intra_size == place.size):
        return "127.0.0.1"
    nodes = env.get("SLURM_STEP_NODELIST") if place.launcher == "Slurm" else None
    if nodes:
        return parse_node_list(nodes, variable="SLURM_STEP_NODELIST")[0]
    given = allocation(env)
    return given.hosts[0].name if given is not None else None


def publish_port(job: str, port: int, *, host: str = "127.0.0.1", secret: str = "") -> None:
    """Rank 0: publish ``port`` for as long as this process lives, in a daemon thread.

    ``host`` is the name by which the other ranks know this host, ``secret`` the job's if it has
    one. Raises LaunchError: all ports of this job are in use.
    """
    for candidate in _candidates(job):
        with suppress(OSError):
            listener = socket.create_server((_interface(host), candidate), backlog=1024)
            authenticated = AuthenticatedListener(
                listener, secret=_discovery_secret(job, secret), role=_ROLE
            )
            threading.Thread(
                target=_serve, args=(authenticated, port), name="port-discovery", daemon=True
            ).start()
            return
    raise LaunchError(
        f"All of the ports {', '.join(map(str, _candidates(job)))} are in use on "
        f"{socket.gethostname()}: export MASTER_ADDR and MASTER_PORT (a free port of rank 0's "
        "host) on all ranks."
    )


def lookup_port(host: str, job: str, limit_s: float, *, secret: str = "") -> int | None:
    """The other ranks: the port that rank 0 has published, or ``None`` after the limit.

    Raises TopologyError: the name of the host is unknown here.
    """
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise TopologyError(
            f"Rank 0 should be on {host!r}, a name that {socket.gethostname()} does not know "
            f"({error}). Export MASTER_ADDR and MASTER_PORT on all ranks."
        ) from None
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for candidate in _candidates(job):
            with (
                suppress(OSError, struct.error, LaunchError),
                connect(
                    f"{address}:{candidate}",
                    secret=_discovery_secret(job, secret),
                    role=_ROLE,
                    line=b"a rank\n",
                    limit_s=_LOOKUP_S,
                    retries=False,  # it may be the listener of another job
                ) as connection,
            ):
                connection.settimeout(_LOOKUP_S)
                return int(_PORT.unpack(connection.recv(_PORT.size, socket.MSG_WAITALL))[0])
        time.sleep(_PAUSE_S)
    return None


def is_loopback(name: str) -> bool:
    """Whether a name or address is one by which every host reaches itself. Local."""
    try:
        return socket.gethostbyname(name).startswith("127.")
    except OSError:
        return False


def _serve(listener: AuthenticatedListener, port: int) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            selector.select(1.0)
            for connection, _ in listener.accept():
                with connection, suppress(OSError):
                    connection.send(_PORT.pack(port))


def _interface(host: str) -> str:
    """This host's address that ``host`` names; empty (all) if it is another one on other hosts."""
    with suppress(OSError):
        address = socket.gethostbyname(host)
        is_plain = host in (address, "localhost") or not address.startswith("127.")
        if is_plain and route_of(address) is not None:
            return address
    return ""


def _discovery_secret(job: str, secret: str) -> str:
    """The secret of the listener: without one of the job, only its name, which others may know."""
    return hashlib.sha256(f"torchmn port discovery {job} {secret}".encode()).hexdigest()


def _candidates(job: str) -> list[int]:
    numbers = hashlib.sha256(f"torchmn ports {job}".encode()).digest()
    span = _LAST_PORT - _FIRST_PORT
    return [
        _FIRST_PORT + int.from_bytes(numbers[i : i + 4], "big") % span
        for i in range(0, 4 * _NUM_PORTS, 4)
    ]
