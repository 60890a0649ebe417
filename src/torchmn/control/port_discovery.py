"""Let ranks find rank 0's port when the launcher tells them their ranks, but no port.

With a fixed port, two jobs on one host would connect to each other, and anyone could wait there for
ranks. So rank 0 listens on a port that the system chose, and publishes it in a file that only the
user of the job can read: in the temporary folder if all ranks are on one host, else in the user's
cache folder, which clusters share between hosts. The file has the address of a listener of rank 0
and the listener's secret; a file that an earlier job left leads nowhere.
"""

import hashlib
import os
import secrets
import selectors
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from torchmn.base.errors import LaunchError
from torchmn.base.private_files import make_private_folder, write_whole
from torchmn.cluster.allocation import allocation
from torchmn.cluster.hostlists import parse_node_list
from torchmn.cluster.launcher_env import LauncherInfo
from torchmn.cluster.network import addresses_of_host, is_loopback, route_of
from torchmn.control.authenticated_listener import AuthenticatedListener, connect
from torchmn.control.connection import address_of, listen_on

_LOOKUP_S = 2.0
_PAUSE_S = 0.05
_PORT = struct.Struct("!H")
_ROLE = "port discovery"
# Variables that have the same value on all ranks of one job step.
JOB_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PALS_APID"),
    *("PBS_JOBID", "JOB_ID"),
)
_OF_ALL_STEPS = frozenset({"SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "JOB_ID"})


def job_name(env: Mapping[str, str]) -> str:
    """Return a name for this step of this job; empty if the environment identifies none.

    The scheduler's job ID alone is not enough: one job may start several worlds.
    """
    names = [name for name in JOB_VARIABLES if env.get(name)]
    if _OF_ALL_STEPS.issuperset(names):
        return ""
    return " ".join(f"{name}={env[name]}" for name in names)


def leader_host(place: LauncherInfo, env: Mapping[str, str]) -> str:
    """Return, on rank 0, the name by which the other ranks know its host.

    Ranks are assumed to follow the order of the launcher's or the scheduler's list of hosts; where
    they do not, MASTER_ADDR must be set. Without a list it is the host's own name.
    """
    if place.is_on_one_host:
        return "127.0.0.1"
    nodes = env.get("SLURM_STEP_NODELIST") if place.launcher == "Slurm" else None
    if nodes:
        return parse_node_list(nodes, variable="SLURM_STEP_NODELIST")[0]
    given = allocation(env)
    return given.hosts[0].name if given is not None else socket.gethostname()


def meeting_folder(place: LauncherInfo, env: Mapping[str, str]) -> Path:
    """Create and return the folder of the files, which all ranks see and no other user.

    Raises LaunchError: it cannot be created, or other users have access to it.
    """
    if place.is_on_one_host:
        folder = Path(tempfile.gettempdir()) / f"torchmn-{os.geteuid()}"
    else:
        cache = env.get("XDG_CACHE_HOME")
        folder = (Path(cache) if cache else Path.home() / ".cache") / "torchmn"
    cure = "Export MASTER_ADDR and MASTER_PORT on all ranks"
    try:
        make_private_folder(folder)
        status = folder.lstat()
    except OSError as error:
        raise LaunchError(
            f"The ranks meet in the folder {folder}, which cannot be created: {error.strerror}. "
            f"{cure}, or set XDG_CACHE_HOME to a folder that all hosts share."
        ) from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o77 or folder.is_symlink():
        raise LaunchError(
            f"The ranks would meet in the folder {folder}, but another user has access to it "
            f"(owner {status.st_uid}, mode {status.st_mode & 0o777:o}) and could take the place of "
            f"a rank. Remove it, or make it yours alone (chmod 700). Otherwise: {cure}."
        )
    return folder


def publish_port(job: str, port: int, *, host: str, folder: Path) -> Callable[[], None]:
    """On rank 0, publish ``port`` in a daemon thread until the returned function is called.

    ``host`` is the name by which the other ranks know this host. Raises LaunchError: the file
    cannot be written.
    """
    secret = secrets.token_hex(32)
    listener = listen_on(_interface(host))
    own_port = address_of(listener).rpartition(":")[2]
    path = _file_of(job, folder)
    try:
        # Whole: a rank may read it at any moment, and an earlier job may have left another one.
        write_whole(path, f"{host}:{own_port} {secret}\n".encode())
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"Rank 0 cannot write {path}, by which the other ranks find it: {error.strerror}. "
            "Export MASTER_ADDR and MASTER_PORT on all ranks."
        ) from None
    authenticated = AuthenticatedListener(listener, secret=secret, role=_ROLE)
    is_over = threading.Event()
    # A thread, since rank 0 is about to wait in torch's store, whose port this is.
    thread = threading.Thread(
        target=_serve, args=(authenticated, port, is_over), name="port-discovery", daemon=True
    )
    thread.start()

    # Joined, so that the listener is closed by the one thread that uses it.
    def withdraw() -> None:
        is_over.set()
        thread.join()
        path.unlink(missing_ok=True)

    return withdraw


def lookup_port(job: str, limit_s: float, *, folder: Path) -> tuple[str, int] | None:
    """On other ranks, return host and port of rank 0, or None after ``limit_s``."""
    path, deadline = _file_of(job, folder), time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError, struct.error, LaunchError):
            os.utime(folder)  # over NFS: look at the folder itself, not at what is remembered of it
            address, secret = path.read_text().split()
            with connect(
                address,
                secret=secret,
                role=_ROLE,
                line=b"a rank\n",
                limit_s=_LOOKUP_S,
                retries=False,  # an earlier job may have left the file
            ) as connection:
                connection.settimeout(_LOOKUP_S)
                return address.rpartition(":")[0], _PORT.unpack(connection.recv(_PORT.size))[0]
        time.sleep(_PAUSE_S)
    return None


def _serve(listener: AuthenticatedListener, port: int, is_over: threading.Event) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while not is_over.is_set():
            selector.select(0.1)
            for connection, _ in listener.accept():
                with connection, suppress(OSError):
                    connection.send(_PORT.pack(port))
    listener.close()


def _interface(host: str) -> str:
    """Return this host's address named ``host``; empty (all) if others may resolve it otherwise."""
    found = addresses_of_host(host)
    if found and (found[0] == host or not is_loopback(host)) and route_of(found[0]) is not None:
        return found[0]
    return ""


def _file_of(job: str, folder: Path) -> Path:
    return folder / hashlib.sha256(job.encode()).hexdigest()[:32]
