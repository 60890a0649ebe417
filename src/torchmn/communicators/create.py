"""`create_communicator`: from a name to a communicator on every rank."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from typing import Any

import torch

from torchmn.communicators.auto import choose_route
from torchmn.communicators.base import Communicator
from torchmn.communicators.flat import FlatCommunicator
from torchmn.communicators.hierarchical import HierarchicalCommunicator
from torchmn.communicators.naive import NaiveCommunicator
from torchmn.communicators.non_cuda_aware import NonCudaAwareCommunicator
from torchmn.communicators.objects import Trust
from torchmn.communicators.pure_nccl import PureNcclCommunicator
from torchmn.communicators.single_node import SingleNodeCommunicator
from torchmn.communicators.transports.base import TimeLimit, Transport
from torchmn.communicators.transports.torch_distributed import TorchDistributedTransport
from torchmn.communicators.transports.world import choose_transport, join_world
from torchmn.communicators.two_dimensional import TwoDimensionalCommunicator
from torchmn.compression import BFloat16, Float16, StripeCodec
from torchmn.errors import DisagreementError, TopologyError, UnknownNameError, UsageError
from torchmn.topology import Topology
from torchmn.topology.environment import launched_place

ROUTES: dict[str, type[Communicator]] = {
    "naive": NaiveCommunicator,
    "flat": FlatCommunicator,
    "hierarchical": HierarchicalCommunicator,
    "two_dimensional": TwoDimensionalCommunicator,
    "single_node": SingleNodeCommunicator,
    "non_cuda_aware": NonCudaAwareCommunicator,
    "pure_nccl": PureNcclCommunicator,
}
_HELLO_BYTES = 512
_WIRE_DTYPES: dict[str, type[StripeCodec] | None] = {
    "float32": None,
    "float16": Float16,
    "bfloat16": BFloat16,
}
_num_created: Counter[int] = Counter()


def create_communicator(
    name: str = "auto",
    *,
    transport: str | Transport = "auto",
    topology: Topology | None = None,
    timeout_s: float = 60,
    allreduce_grad_dtype: torch.dtype | str | None = None,
) -> Communicator:
    """Join the other ranks of this job. *Collective*: every rank, with the same arguments.

    Args:
        name: the route of a mean: ``auto``, ``naive``, ``flat``, ``hierarchical``,
            ``two_dimensional``, ``single_node``, ``non_cuda_aware`` or ``pure_nccl``.
        transport: ``auto``, ``mpi``, ``torch``, or a `Transport`.
        topology: which rank stands on which node; found from host names when not given.
        timeout_s: the limit of every single collective in seconds.
        allreduce_grad_dtype: float16 or bfloat16 on the wire, else the gradients' own dtype.

    Raises:
        UnknownNameError: no such route or transport.
        UnsupportedError: the route cannot serve this placement, device or transport.
        TopologyError: launcher, MPI and host names contradict each other.
        DisagreementError: ranks asked for different communicators.
        TimeLimitError: not all ranks came within ``timeout_s``.

    Names: ChainerMN's `create_communicator` (ancestors 1.2).
    """
    if name != "auto" and name not in ROUTES:
        raise UnknownNameError("communicator", name, ["auto", *ROUTES])
    if not timeout_s > 0:
        raise UsageError(f"timeout_s={timeout_s} must be a positive number of seconds.")
    codec = _wire_codec(allreduce_grad_dtype)
    world, is_own = _world(transport, timeout_s)
    greeting = {"name": name, "dtype": codec.name if codec else None, "torch": torch.__version__}
    found = _exchange_hosts(world, greeting, timeout_s)
    topology = _checked_topology(topology, found, world)
    place = topology.place(world.rank)
    device = _own_device(place.intra_rank)
    if is_own:
        own = world
    else:
        if isinstance(world, TorchDistributedTransport):
            world.cuda_device = device if device.type == "cuda" else None
        _num_created[id(world)] += 1
        own = world.split(
            range(world.size), f"communicator{_num_created[id(world)]}", TimeLimit(timeout_s)
        )
    reason = ""
    if name == "auto":
        name, reason = choose_route(topology, device)
    return ROUTES[name](
        own,
        topology,
        device=device,
        timeout_s=timeout_s,
        trust=_trust(own),
        codec=codec,
        reason=reason,
    )


def _world(transport: str | Transport, timeout_s: float) -> tuple[Transport, bool]:
    """The transport of all ranks, and whether it is this communicator's own."""
    if isinstance(transport, Transport):
        return transport, True
    launched = launched_place(os.environ)
    kind = choose_transport(transport, launched, os.environ, has_cuda=torch.cuda.is_available())
    return join_world(kind, timeout_s), False


def _trust(transport: Transport) -> Trust:
    secret = os.environ.get("TORCHMN_SECRET")
    return Trust(is_private=transport.is_trusted, secret=secret.encode() if secret else None)


def _wire_codec(dtype: torch.dtype | str | None) -> StripeCodec | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in _WIRE_DTYPES:
        raise UnknownNameError("allreduce_grad_dtype", name, _WIRE_DTYPES)
    factory = _WIRE_DTYPES[name]
    return factory() if factory else None


def _exchange_hosts(world: Transport, greeting: dict[str, Any], timeout_s: float) -> list[str]:
    """Every rank's host name. Raises DisagreementError: ranks want different communicators."""
    said = json.dumps({"host": socket.gethostname(), **greeting}).encode()
    if len(said) > _HELLO_BYTES:
        raise UsageError(f"Host name {socket.gethostname()!r} is too long.")
    table = torch.zeros(world.size, _HELLO_BYTES, dtype=torch.uint8)
    table[world.rank, : len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    world.all_gather_stripes_(table.view(-1), TimeLimit(timeout_s))
    rows = [json.loads(row.numpy().tobytes().rstrip(b"\0")) for row in table]
    for what in greeting:
        values = [row[what] for row in rows]
        if len(set(values)) > 1:
            raise DisagreementError(
                f"Ranks came to create_communicator with different {what}: "
                + ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
                + ". All ranks must give the same arguments and run the same versions."
            )
    return [row["host"] for row in rows]


def _checked_topology(given: Topology | None, found_hosts: list[str], world: Transport) -> Topology:
    if given is not None:
        if given.size != world.size:
            raise TopologyError(
                f"The given topology has {given.size} ranks, the world has {world.size}. "
                "Give one host name per rank."
            )
        return given
    topology = Topology(tuple(found_hosts))
    launched = launched_place(os.environ)
    place = topology.place(world.rank)
    if (
        launched is not None
        and launched.known_size == world.size
        and launched.intra_rank is not None
        and launched.intra_rank != place.intra_rank
    ):
        raise TopologyError(
            f"{launched.launcher} says that rank {world.rank} is number {launched.intra_rank} on "
            f"its node, but by host names ({', '.join(found_hosts)}) it is number "
            f"{place.intra_rank}. Give every node its own host name, or pass topology=."
        )
    return topology


def _own_device(intra_rank: int) -> torch.device:
    """The worker's GPU, made current before any CUDA call, so that no context lands elsewhere."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices == 0 or os.environ.get("TORCHMN_BACKEND") == "gloo":
        return torch.device("cpu")
    device = torch.device("cuda", intra_rank % num_devices)
    torch.cuda.set_device(device)
    return device
