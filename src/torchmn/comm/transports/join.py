"""Joining the world: make the transport of all ranks of this job, once per process.

MPI has one world per process and a torchrun store one server, so the first communicator joins the
world and all communicators are split from it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from torchmn.base.errors import (
    LaunchError,
    PeerLostError,
    TimeLimitError,
    TopologyError,
    UnsupportedError,
    UsageError,
    raise_if_unknown,
)
from torchmn.base.torch_private import HashStore, PrefixStore, Store, TCPStore, default_store
from torchmn.cluster.environment_variables import SECRET_VARIABLE, TRANSPORT_VARIABLE
from torchmn.cluster.launcher_env import LauncherInfo, raise_if_contradicted
from torchmn.cluster.network import addresses_of_host, is_loopback, route_to
from torchmn.comm.transports.base import TimeLimit, Transport, gather_json
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.comm.transports.mpi import MpiTransport
from torchmn.comm.transports.own_rank import (
    is_adopted,
    own_place,
    warn_if_alone_among_children,
)
from torchmn.control import port_discovery
from torchmn.control.connection import listen_on
from torchmn.control.rank_claim import claim_rank, raise_started_by_rank

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from torchmn.comm.base import Communicator


TransportName = Literal["auto", "mpi", "torch"]
TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)

_STORE_BACKLOG = 4096

_joined: dict[object, tuple[int, Transport]] = {}
"""The transport of all ranks, with the process that joined: after a fork that is the parent."""
_met: list[tuple[str, TCPStore]] = []
_until_joined = contextlib.ExitStack()
"""Withdraws the published port of rank 0 once all ranks have joined."""


def choose_transport(
    name: str, launched: LauncherInfo | None, environment: Mapping[str, str], *, has_cuda: bool
) -> str:
    """Resolve ``auto`` to ``mpi`` or ``torch``. Raises UnknownNameError.

    ``torch`` if the ranks are those of the script's process group, else the choice of
    ``torchmn run``, else ``mpi`` for CPUs under an MPI launcher if mpi4py is installed, else
    ``torch``.
    """
    raise_if_unknown("transport", name, TRANSPORTS)
    if name != "auto":
        return name
    if is_adopted(launched):
        return "torch"
    asked = environment.get(TRANSPORT_VARIABLE, "auto")
    if asked != "auto":
        return choose_transport(asked, launched, environment, has_cuda=has_cuda)
    under_mpi = launched is not None and launched.kind == "mpi"
    return "mpi" if under_mpi and not has_cuda and _has_mpi4py() else "torch"


def join_world(kind: str, timeout_s: float) -> Transport:
    """Return the transport of all ranks of the job. *Collective* the first time, then cached.

    Raises TopologyError: MPI and the launcher's variables contradict each other; LaunchError: there
    is no rendezvous address; TimeLimitError: not all ranks joined; UsageError: another process has
    joined as this rank.
    """
    launched = own_place()
    key = (kind, id(default_store())) if is_adopted(launched) else kind
    if key in _joined:
        pid, transport = _joined[key]
        if launched is not None and transport.size > 1 and pid != os.getpid():  # forked since then
            raise_started_by_rank(launched, pid)
        return transport
    if kind == "mpi":
        if launched is not None:
            claim_rank(launched, os.environ)
        transport = MpiTransport.world(timeout_s)
        if launched is not None:
            raise_if_contradicted(
                launched, rank=transport.rank, size=transport.size, source="MPI.COMM_WORLD"
            )
    else:
        transport = _join_torch(launched, timeout_s)
    _joined[key] = os.getpid(), transport
    return transport


def _join_torch(launched: LauncherInfo | None, timeout_s: float) -> Transport:
    if launched is None or launched.size == 1:
        warn_if_alone_among_children()
        has_secret = bool(os.environ.get(SECRET_VARIABLE))
        return TorchDistributedTransport(
            HashStore(), 0, 1, timeout_s=timeout_s, is_trusted=has_secret
        )
    address, server = meet(launched, timeout_s)
    # A prefix, because init_process_group() of the script may use the same server.
    store = PrefixStore("torchmn", server)
    # Rank 0 publishes its port until the barrier: late ranks look it up until then.
    with _until_joined:
        transport = TorchDistributedTransport(
            store,
            launched.rank,
            launched.size,
            timeout_s=timeout_s,
            own_address=_own_address(launched, address, store) if address else None,
            supports_nccl=not is_adopted(launched) or "nccl" in str(dist.get_backend_config()),
        )
        try:
            transport.barrier(TimeLimit(timeout_s))
        except (TimeLimitError, PeerLostError) as error:
            raise type(error)(
                f"Rank {launched.rank} of {launched.size} on {socket.gethostname()}: not all ranks "
                f"joined. {error}"
            ) from error
    return transport


def meet(launched: LauncherInfo, timeout_s: float) -> tuple[str, Store]:
    """Rank 0's address as seen from this rank, and its store. Connects once per process.

    If the script's process group is adopted, its store and an empty address. Raises the same errors
    as `join_world`.
    """
    if is_adopted(launched):
        return "", default_store()
    if not _met:
        claim_rank(launched, os.environ)
        _met.append(_connect_store(launched, timeout_s))
    return _met[0]


def _connect_store(launched: LauncherInfo, timeout_s: float) -> tuple[str, TCPStore]:
    """Rank 0's address as seen from this rank, and a connection to its store.

    The store is at MASTER_ADDR and MASTER_PORT, or at a free port that rank 0 publishes over MPI or
    in a file.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address and port:
        if not port.isdigit() or not 0 < int(port) < 65536:
            raise LaunchError(f"MASTER_PORT={port!r} must be a port number from 1 to 65535.")
        _raise_if_address_is_local(launched, address)
        return address, _store(launched, address, int(port), timeout_s)
    if launched.kind == "mpi" and _has_mpi4py():
        return _store_over_mpi(launched, join_world("mpi", timeout_s), timeout_s)
    job = port_discovery.job_name(os.environ)
    if not job:
        raise LaunchError(
            f"Started by {launched.launcher} as rank {launched.rank} of {launched.size}, but there "
            "is no rendezvous address (MASTER_ADDR, MASTER_PORT) for torch.distributed. Export "
            "MASTER_ADDR (the host of rank 0) and MASTER_PORT (a free port) on all ranks, or "
            "install mpi4py."
        )
    folder = port_discovery.meeting_folder(launched, os.environ)
    if launched.rank == 0:
        host = port_discovery.leader_host(launched, os.environ)
        store = _store(launched, host, 0, timeout_s)
        _until_joined.callback(
            port_discovery.publish_port(job, store.port, host=host, folder=folder)
        )
        return host, store
    found = port_discovery.lookup_port(job, timeout_s, folder=folder)
    if found is None:
        raise TimeLimitError(
            f"Rank {launched.rank} of {launched.size} on {socket.gethostname()} found no rank 0 of "
            f"this job ({job}) through the folder {folder} within {timeout_s:g} s. Check that "
            "rank 0 runs, and that its host shares this folder (set XDG_CACHE_HOME to one that "
            "all hosts share); otherwise export MASTER_ADDR and MASTER_PORT on all ranks."
        )
    return found[0], _store(launched, *found, timeout_s)


def _store(launched: LauncherInfo, address: str, port: int, timeout_s: float) -> TCPStore:
    # torchrun's agent serves the store itself, if it sets this variable.
    serves = launched.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listener = _store_listener(launched, address, port) if serves else None
    try:
        # multi_tenant: init_process_group() of the script shares this server; otherwise it would
        # fail, because the port is in use.
        if listener is not None:
            return serve_store(
                listener,
                address,
                timeout_s=timeout_s,
                num_ranks=launched.size,
                multi_tenant=True,
            )
        return TCPStore(
            address,
            port,
            launched.size,
            serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if serves:
            raise LaunchError(
                f"Rank 0 could not listen on {address}:{port}: {reason}. Another job may use the "
                "port: choose another MASTER_PORT."
            ) from error
        raise TimeLimitError(
            f"Rank {launched.rank} of {launched.size} on {socket.gethostname()} did not reach rank "
            f"0 at {address}:{port} within {timeout_s:g} s ({reason}). Check that rank 0 runs and "
            "that this host can resolve and reach MASTER_ADDR."
        ) from error


def _store_listener(launched: LauncherInfo, address: str, port: int) -> socket.socket | None:
    """A listener for rank 0's store on the interface of ``address`` only; None to let torch listen.

    torch listens on all interfaces. That is needed if the host's own name resolves to a loopback
    address, at which other hosts cannot reach it. If the port is in use, torch either finds a
    server that the script has made in this process, or raises.
    """
    is_alone = launched.intra_size == launched.size
    if is_loopback(address) and _names_own_host(address) and not is_alone:
        return None
    with contextlib.suppress(OSError):
        return listen_on(address, port, backlog=_STORE_BACKLOG)
    return None


def _raise_if_address_is_local(launched: LauncherInfo, address: str) -> None:
    """Raise TopologyError if ``address`` is a loopback address and there are several hosts."""
    if _spans_nodes(launched) and is_loopback(address) and not _names_own_host(address):
        raise TopologyError(
            f"MASTER_ADDR={address} is a loopback address, but {launched}, on several hosts. "
            "Export the name or address of rank 0's host as MASTER_ADDR on all ranks."
        )


def _names_own_host(address: str) -> bool:
    """Whether ``address`` is a host name, which may be a loopback address on that host only."""
    return address not in ("localhost", "localhost.localdomain") and not address[0].isdigit()


def _spans_nodes(launched: LauncherInfo) -> bool:
    if launched.inter_size is not None:
        return launched.inter_size > 1
    return launched.intra_size is not None and launched.intra_size < launched.size


def _own_address(launched: LauncherInfo, leader: str, store: PrefixStore) -> str | None:
    """The address at which other ranks reach this one, or None to let gloo choose.

    It is the source address of this rank's route to rank 0. On rank 0's own host that may be a
    loopback address: ranks of other hosts therefore publish the address at which they reach rank
    0's host. GLOO_SOCKET_IFNAME takes precedence.
    """
    if interfaces := os.environ.get("GLOO_SOCKET_IFNAME"):
        _raise_if_no_interface(interfaces)
        return None
    route = route_to(leader)
    if route is None or not _spans_nodes(launched):
        return None if route is None else route.address
    if not route.is_loopback:
        store.set("leader_address", addresses_of_host(leader)[0])
        return route.address
    return bytes(store.get("leader_address")).decode()


def _raise_if_no_interface(names: str) -> None:
    """Raise UsageError if this host has none of a name in GLOO_SOCKET_IFNAME.

    gloo's error would look like that of a lost rank, and the job like one that hangs.
    """
    known = [name for _, name in socket.if_nameindex()]
    for name in names.split(","):
        if name.partition(":")[0] not in known:  # an address may have a label, as in eth0:1
            raise UsageError(
                f"GLOO_SOCKET_IFNAME={names}: {socket.gethostname()} has no interface {name!r}, "
                f"but {', '.join(known)}. Name one of these here, or leave the variable out."
            )


def _store_over_mpi(
    launched: LauncherInfo, mpi_world: Transport, timeout_s: float
) -> tuple[str, TCPStore]:
    """Connect to rank 0's store, whose address is sent over MPI. *Collective.*"""
    store, place = None, None
    if mpi_world.rank == 0:
        store = _store(launched, socket.gethostname(), 0, timeout_s)
        place = socket.gethostname(), store.port
    address, port = gather_json(mpi_world, place, TimeLimit(timeout_s))[0]
    return address, store or _store(launched, address, port, timeout_s)


def _has_mpi4py() -> bool:
    from importlib.util import find_spec

    return "mpi4py" in sys.modules or find_spec("mpi4py") is not None


# torch.__version__ is a TorchVersion, which compares as a version and not as text.
_CAN_TAKE_LISTENER = torch.__version__ >= "2.8"
"""Whether torch's newer (libuv) store server accepts a listener; the older one always does."""


def serve_store(
    listener: socket.socket,
    address: str,
    *,
    timeout_s: float,
    num_ranks: int | None = None,
    multi_tenant: bool = False,
) -> TCPStore:
    """Serve a store on an existing listener. By itself torch listens on all interfaces.

    Args:
        listener: a listening TCP socket, which the store takes over.
        address: the address of this host, at which the server connects to itself.
        timeout_s: the time limit of requests to the store.
        num_ranks: the number of ranks that will connect, if known.
        multi_tenant: whether other TCPStores of this process on this port share the server.
    """
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        num_ranks,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        master_listen_fd=listener.detach(),
        **({} if _CAN_TAKE_LISTENER else {"use_libuv": False}),
    )


# torch's process groups and device meshes over the ranks of a communicator.
#
# `fully_shard`, `parallelize_module` and torch's pipelines take a `DeviceMesh`, which needs process
# groups within torch's default process group. If the script has not initialized that, it is done
# here, with the store at which the ranks of the job have met. Under MPI its gloo groups exist
# beside MPI.


def make_process_group(comm: Communicator) -> dist.ProcessGroup:
    """A process group of `torch.distributed` of the same ranks, in order. *Collective.*

    Raises UnsupportedError: ranks are threads, or are not in the order of the default group.
    """
    if not dist.is_initialized():
        _make_default_world(comm)
    ranks = torch_ranks(comm)
    if ranks != sorted(set(ranks)):
        raise UnsupportedError(
            f"{comm.rank_label}: the ranks of this communicator are {ranks} in torch's default "
            "world. A process group needs different processes in ascending order: split with "
            "key=comm.rank, and start ranks as processes."
        )
    group: Any = dist.group.WORLD
    if len(ranks) < dist.get_world_size():
        timeout = timedelta(seconds=comm.timeout_s)
        # By default new_group() must be called by all ranks of the default group.
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    return cast("dist.ProcessGroup", group)


def torch_ranks(comm: Communicator) -> list[int]:
    """The ranks of a communicator in torch's default process group. *Collective.*"""
    return comm.allgather_obj(dist.get_rank())


def mesh_of_groups(
    groups: Sequence[dist.ProcessGroup], names: Sequence[str], ranks: Tensor, device_type: str
) -> DeviceMesh:
    """A DeviceMesh from a group for each axis. Local.

    ``ranks`` (size of axis 0, size of axis 1, ...) holds ranks of the default process group.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=tuple(names))
    return DeviceMesh.from_group(list(groups), device_type, mesh=ranks, mesh_dim_names=tuple(names))


def _make_default_world(comm: Communicator) -> None:
    """Initialize torch's default process group with all processes of the job. *Collective.*"""
    launched = own_place()
    timeout = timedelta(seconds=comm.timeout_s)
    backend = "gloo" if comm.device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if launched is None or launched.size == 1:
        if comm.size > 1:
            raise UnsupportedError(
                f"{comm.rank_label}: torch's default world needs one process per rank, started by "
                "a launcher. Use torchmn run, or call torch.distributed.init_process_group() "
                "before."
            )
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    _, server = meet(launched, comm.world.first_timeout_s)
    atexit.register(_destroy_default_world)
    dist.init_process_group(
        backend,
        store=PrefixStore("torchmn default world", server),
        rank=launched.rank,
        world_size=launched.size,
        timeout=timeout,
    )


def _destroy_default_world() -> None:
    """Destroy torch's default process group at exit, if it still exists.

    gloo's threads end the process with SIGABRT if groups still exist when Python finalizes.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
