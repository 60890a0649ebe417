"""The transport that joins all ranks of this job, made once per process.

MPI has one world per process, and a torchrun store one server: so the first communicator joins,
and later ones are split off.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from torchmn.communicators.transports.base import TimeLimit, Transport
from torchmn.communicators.transports.mpi import MpiTransport
from torchmn.communicators.transports.torch_distributed import TorchDistributedTransport
from torchmn.errors import LaunchError, PeerLostError, TimeLimitError, UnknownNameError
from torchmn.topology.environment import LaunchedPlace, launched_place, raise_if_contradicted

TRANSPORTS = ("auto", "mpi", "torch")

_joined: dict[str, Transport] = {}


def choose_transport(
    name: str, launched: LaunchedPlace | None, environment: Mapping[str, str], *, has_cuda: bool
) -> str:
    """``auto`` to ``mpi`` or ``torch``. Raises UnknownNameError.

    What ``torchmn run`` asked for, else NCCL for GPUs, else MPI under an MPI launcher if mpi4py is
    there.
    """
    if name not in TRANSPORTS:
        raise UnknownNameError("transport", name, TRANSPORTS)
    if name != "auto":
        return name
    asked = environment.get("TORCHMN_TRANSPORT", "auto")
    if asked != "auto":
        return choose_transport(asked, launched, environment, has_cuda=has_cuda)
    under_mpi = launched is not None and launched.kind == "mpi"
    return "mpi" if under_mpi and not has_cuda and _has_mpi4py() else "torch"


def join_world(kind: str, timeout_s: float) -> Transport:
    """The transport of all ranks of the job. *Collective* the first time, then cached.

    Raises TopologyError: MPI and the launcher's variables contradict each other; LaunchError: there
    is no meeting point; TimeLimitError: not all ranks came.
    """
    if kind in _joined:
        return _joined[kind]
    launched = launched_place(os.environ)
    transport: Transport
    if kind == "mpi":
        transport = MpiTransport.world(timeout_s)
        if launched is not None:
            raise_if_contradicted(
                launched, rank=transport.rank, size=transport.size, source="MPI.COMM_WORLD"
            )
    else:
        transport = _join_torch(launched, timeout_s)
    _joined[kind] = transport
    return transport


def _join_torch(launched: LaunchedPlace | None, timeout_s: float) -> Transport:
    secret = bool(os.environ.get("TORCHMN_SECRET"))
    if launched is None or launched.size == 1:
        return TorchDistributedTransport(HashStore(), 0, 1, timeout_s=timeout_s, is_trusted=secret)
    address, port = _meeting_point(launched, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    serves = launched.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        # multi_tenant: the user's own init_process_group() finds the same server and shares it.
        store = TCPStore(
            address,
            port,
            launched.size,
            serves,
            timeout=timeout,
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
            f"0 at {address}:{port} within {timeout_s:g} s ({reason}). See whether rank 0 runs and "
            "whether MASTER_ADDR names its host for this one."
        ) from error
    transport = TorchDistributedTransport(
        PrefixStore("torchmn", store), launched.rank, launched.size, timeout_s=timeout_s
    )
    try:
        transport.barrier(TimeLimit(timeout_s))
    except (TimeLimitError, PeerLostError) as error:
        raise type(error)(
            f"Rank {launched.rank} of {launched.size} on {socket.gethostname()}: not all ranks "
            f"joined. {error}"
        ) from error
    return transport


def _meeting_point(launched: LaunchedPlace, timeout_s: float) -> tuple[str, int]:
    """Where rank 0 listens: MASTER_ADDR and MASTER_PORT, or a free port that MPI makes known."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address and port:
        if not port.isdigit() or not 0 < int(port) < 65536:
            raise LaunchError(f"MASTER_PORT should be a port number but is {port!r}.")
        return address, int(port)
    if launched.kind == "mpi" and _has_mpi4py():
        mpi_world = join_world("mpi", timeout_s)
        return _announce_port(mpi_world, timeout_s)
    raise LaunchError(
        f"Started by {launched.launcher} as rank {launched.rank} of {launched.size}, but there is "
        "no meeting point for torch.distributed. Export MASTER_ADDR (the host of rank 0) and "
        "MASTER_PORT (a free port) on all ranks, or install mpi4py."
    )


def _announce_port(mpi_world: Transport, timeout_s: float) -> tuple[str, int]:
    """Rank 0 finds a free port and tells all ranks over MPI."""
    import torch

    row = torch.zeros(256, dtype=torch.uint8)
    if mpi_world.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            text = f"{socket.gethostname()}:{probe.getsockname()[1]}".encode()
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    mpi_world.broadcast_(row, 0, TimeLimit(timeout_s))
    address, port = row.numpy().tobytes().rstrip(b"\0").decode().rsplit(":", 1)
    return address, int(port)


def _has_mpi4py() -> bool:
    from importlib.util import find_spec

    return "mpi4py" in sys.modules or find_spec("mpi4py") is not None
