"""How ranks find rank 0's port when their launcher says where rank 0 is, but no port.

A fixed port would let two jobs on one host meet. So rank 0 listens on a port that the system chose,
and tells it at one of a few others that follow from the name of the job, which all its ranks know.
It tells only who asks for this very job, and where TORCHMN_SECRET is set who knows that as well.
Nothing secret is told: whoever may look at the host's sockets sees the port as well.
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
_ASK_S = 2.0
_PAUSE_S = 0.05
_PORT = struct.Struct("!H")
_ROLE = "meeting"
_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PALS_APID"),
    *("PBS_JOBID", "JOB_ID"),
)
"""What is the same for all ranks of one start."""
_OF_ALL_STARTS = frozenset({"SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "JOB_ID"})


def job_name(env: Mapping[str, str]) -> str:
    """What tells this job, and this step of it, from all others; empty if nothing does.

    A scheduler's number alone is not enough: one job may start several worlds.
    """
    names = [name for name in _VARIABLES if env.get(name)]
    if _OF_ALL_STARTS.issuperset(names):
        return ""
    return " ".join(f"{name}={env[name]}" for name in names)


def leader_host(place: LauncherInfo, env: Mapping[str, str]) -> str | None:
    """The host of rank 0 as the launcher or the scheduler says, or ``None``.

    Where all ranks stand on one host it is this one. Ranks are taken to be counted along the list
    of hosts; who says otherwise must say MASTER_ADDR too.
    """
    if place.inter_size == 1 or (place.intra_size is not None and place.intra_size == place.size):
        return "127.0.0.1"
    nodes = env.get("SLURM_STEP_NODELIST") if place.launcher == "Slurm" else None
    if nodes:
        return parse_node_list(nodes, variable="SLURM_STEP_NODELIST")[0]
    given = allocation(env)
    return given.hosts[0].name if given is not None else None


def publish_port(job: str, port: int, *, host: str = "127.0.0.1", secret: str = "") -> None:
    """Rank 0: tell the others ``port`` as long as this process lives, in a daemon thread.

    ``host`` is where the others look for us, ``secret`` that of the job if it has one. Raises
    LaunchError: all ports of this job are taken.
    """
    for candidate in _candidates(job):
        with suppress(OSError):
            listener = socket.create_server((_interface(host), candidate), backlog=1024)
            gate = AuthenticatedListener(listener, secret=_word(job, secret), role=_ROLE)
            threading.Thread(target=_answer, args=(gate, port), name="meeting", daemon=True).start()
            return
    raise LaunchError(
        f"All of the ports {', '.join(map(str, _candidates(job)))} are taken on "
        f"{socket.gethostname()}: export MASTER_ADDR and MASTER_PORT (a free port of rank 0's "
        "host) on all ranks."
    )


def lookup_port(host: str, job: str, limit_s: float, *, secret: str = "") -> int | None:
    """The other ranks: rank 0's port, or ``None`` if nobody told it within the limit.

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
                    secret=_word(job, secret),
                    role=_ROLE,
                    line=b"a rank\n",
                    limit_s=_ASK_S,
                    retries=False,  # it may be the listener of another job
                ) as connection,
            ):
                connection.settimeout(_ASK_S)
                return int(_PORT.unpack(connection.recv(_PORT.size, socket.MSG_WAITALL))[0])
        time.sleep(_PAUSE_S)
    return None


def is_loopback(name: str) -> bool:
    """Whether a name or address leads every host to itself. Unknown names do not."""
    try:
        return socket.gethostbyname(name).startswith("127.")
    except OSError:
        return False


def _answer(gate: AuthenticatedListener, port: int) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(gate, selectors.EVENT_READ)
        while True:
            selector.select(1.0)
            for connection, _ in gate.accept():
                with connection, suppress(OSError):
                    connection.send(_PORT.pack(port))


def _interface(host: str) -> str:
    """The address of ours that ``host`` stands for; all, where others are led elsewhere by it."""
    with suppress(OSError):
        address = socket.gethostbyname(host)
        is_plain = host in (address, "localhost") or not address.startswith("127.")
        if is_plain and route_of(address) is not None:
            return address
    return ""


def _word(job: str, secret: str) -> str:
    """What who asks must know: without a secret, the name of the job, which others may know too."""
    return hashlib.sha256(f"torchmn meeting {job} {secret}".encode()).hexdigest()


def _candidates(job: str) -> list[int]:
    numbers = hashlib.sha256(f"torchmn ports {job}".encode()).digest()
    span = _LAST_PORT - _FIRST_PORT
    return [
        _FIRST_PORT + int.from_bytes(numbers[i : i + 4], "big") % span
        for i in range(0, 4 * _NUM_PORTS, 4)
    ]
