"""`create_communicator`: join the ranks of the job, choose a route, make a communicator."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from torchmn.base import events
from torchmn.base.errors import (
    ResultWarning,
    TopologyError,
    UnsupportedError,
    UsageError,
    raise_if_unknown,
)
from torchmn.base.names import RouteName
from torchmn.base.warn import warn
from torchmn.cluster import RankPlacement, Topology
from torchmn.cluster.environment_variables import (
    BACKEND_VARIABLE,
    INPUT_RANK_VARIABLE,
    RECORD_VARIABLE,
    SECRET_VARIABLE,
)
from torchmn.cluster.gpus import may_share_gpus, shared_gpu_problem
from torchmn.cluster.launcher_env import LauncherInfo
from torchmn.cluster.network import rdma_adapters
from torchmn.cluster.operating_system import require_linux
from torchmn.cluster.units import MiB
from torchmn.comm.base import Communicator
from torchmn.comm.codecs import Codec, create_codec
from torchmn.comm.collective_checks import raise_if_values_differ
from torchmn.comm.object_codec import Trust
from torchmn.comm.routes.base import Route
from torchmn.comm.routes.flat import FlatRoute, NaiveRoute
from torchmn.comm.routes.hierarchical import HierarchicalRoute, NonCudaAwareRoute
from torchmn.comm.routes.pure_nccl import PureNcclRoute
from torchmn.comm.routes.single_node import SingleNodeRoute
from torchmn.comm.routes.two_dimensional import TwoDimensionalRoute
from torchmn.comm.transports.base import TimeLimit, Transport, gather_json
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.comm.transports.join import TransportName, choose_transport, join_world
from torchmn.comm.transports.mpi import MpiTransport
from torchmn.comm.transports.own_rank import own_place
from torchmn.comm.transports.tcp import MAX_PEERS, TcpTransport
from torchmn.comm.waiting import PeerStatus, Timeout
from torchmn.control.rank_listener import RankAddress
from torchmn.control.terminal_input import PERSON_S, has_terminal
from torchmn.record import recording

ROUTES: dict[str, type[Route]] = {
    route.name: route
    for route in (
        NaiveRoute,
        FlatRoute,
        HierarchicalRoute,
        TwoDimensionalRoute,
        SingleNodeRoute,
        NonCudaAwareRoute,
        PureNcclRoute,
    )
}
_UUID_DIGITS = 12
GradDtype = Literal["float32", "float16", "bfloat16"]
_num_created: Counter[int] = Counter()
_FIRST_FACTOR = 5.0
_NO_LIMIT_S = 30 * 24 * 3600.0
"""Stands for no limit: longer than any job. gloo does not support an infinite limit."""


def _raise_if_imported_again() -> None:
    """Raise UsageError if a child of multiprocessing is importing the main script."""
    # Set by multiprocessing.spawn while it prepares the child, and deleted afterwards.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "create_communicator() was called while a process of multiprocessing, such as a "
            "DataLoader worker, imports the script. That process is not a rank. Move the code of "
            "the script into a function and call it under if __name__ == '__main__':."
        )


def create_communicator(
    name: RouteName | Literal["auto"] = "auto",
    *,
    transport: TransportName | Transport = "auto",
    topology: Topology | None = None,
    timeout_s: float | Timeout = Timeout(),  # noqa: B008 - frozen
    allreduce_grad_dtype: torch.dtype | GradDtype | None = None,
    quiet: bool = False,
) -> Communicator:
    """Join the other ranks of this job. *Collective*: every rank, with the same arguments.

    The ranks are those of the launcher or, in processes that the script has started itself, those
    of the default process group that it has initialized.

    Args:
        name: the route of sums: ``auto`` (fixed rules on one node; between nodes the fastest of
            some timed candidates; `Communicator.reason` has the choice and the reason),
            ``naive``, ``flat``, ``hierarchical``, ``two_dimensional``, ``single_node``,
            ``non_cuda_aware`` or ``pure_nccl``.
        transport: ``auto``, ``mpi``, ``torch``, or a `Transport`.
        topology: the host of each rank; by default from the host names.
        timeout_s: how long a collective waits for other ranks. A `Timeout` has separate limits for
            ranks that are computing, such as rank 0 in an evaluation, for ranks that will not
            arrive, and for the latter until the first exchange of gradients has ended. A number
            of seconds is the limit in both cases, and 5 times that at the beginning; 0 means no
            limit.
        allreduce_grad_dtype: float16 or bfloat16 to send gradients in; by default their own dtype.
        quiet: only rank 0 prints, and a rank that has the terminal, for a debugger: what other
            ranks write to ``sys.stdout`` is dropped until `finalize`. Warnings and errors, on
            ``sys.stderr``, are shown.

    Raises:
        UnknownNameError: unknown route, transport or dtype.
        UnsupportedError: the route does not support this placement, device or transport, or some
            ranks have a GPU and some have none; or there are several ranks and this is no Linux.
        TopologyError: launcher, MPI and host names contradict each other.
        LaunchError: there is no rendezvous address, or MPI was finalized.
        RankMismatchError: ranks gave different arguments or run different versions of torch.
        TimeLimitError: not all ranks joined within ``Timeout.first_s``.
        UsageError: a limit is negative or infinite; a child of multiprocessing calls this while it
            imports the script; or another process has joined as this rank, for example because a
            rank started a program that calls this.

    Example:
        >>> import torchmn
        >>> comm = torchmn.create_communicator()
        >>> comm.rank, comm.size  # this process alone
        (0, 1)
        >>> comm.finalize()

    Named after ChainerMN's `create_communicator`.
    """
    raise_if_unknown("communicator", name, ["auto", *ROUTES])
    timeout, first_s = _limits(timeout_s)
    codec = _codec_of(allreduce_grad_dtype)
    _raise_if_imported_again()
    for observer in events.observers:
        observer.joining(first_s, begins=True)
    # Where a rank may be at a prompt for any time, the launcher alone checks the limit.
    is_supervised = any(each.ends_lost_ranks for each in events.observers)
    may_be_at_prompt = is_supervised and INPUT_RANK_VARIABLE in os.environ
    world, is_own = _world(transport, PERSON_S if may_be_at_prompt else first_s)
    for observer in events.observers:
        observer.joining(first_s, begins=False)
    greeting: dict[str, Any] = {
        "name": name,
        "dtype": codec.name if codec else None,
        "torch": torch.__version__,
        "timeout_s": [timeout.unreachable_s, timeout.busy_s],
    }
    found = _exchange_greetings(world, greeting, first_s)
    if world.rank == 0 and not _num_created[id(world)]:
        _warn_if_hashes_differ({each["hash"] for each in found})
    is_recorded = all(each["records"] for each in found)
    topology = _checked_topology(topology, [each["host"] for each in found], world)
    has_rdma = any(each["rdma"] for each in found)
    device = _own_device(topology, [each["gpus"] for each in found], world, is_own=is_own)

    def make(route: str, reason: str) -> Communicator:
        own = world if is_own else _own_part(world, topology, device, first_s, has_rdma=has_rdma)
        return Communicator(
            ROUTES[route],
            own,
            topology,
            device=device,
            timeout_s=timeout.unreachable_s,
            trust=_trust(own),
            codec=codec,
            reason=reason,
            first_timeout_s=first_s,
        )

    if name != "auto":
        return _ready(make(name, ""), timeout, is_recorded=is_recorded, quiet=quiet)
    routes = candidate_routes(topology, device, has_nccl=world.supports_nccl)
    if is_own and len(routes) > 1:  # a given transport can be used once
        routes = dict([next(iter(routes.items()))])
    candidates = {each: partial(make, each, why) for each, why in routes.items()}
    route, comm, measured = fastest(candidates)
    if measured:
        comm.reason = f"{route}; {comm.reason}; {measured}"
    return _ready(comm, timeout, is_recorded=is_recorded, quiet=quiet)


def _ready(comm: Communicator, timeout: Timeout, *, is_recorded: bool, quiet: bool) -> Communicator:
    """Finish a communicator: status of peers, warnings, recording, output. *Collective.*"""
    if comm.size > 1 and timeout.busy_s > timeout.unreachable_s:
        peers = PeerStatus(comm.groups.addresses, timeout.busy_s)
        comm.on_finalize(peers.close)
        own: list[Any] = [*peers.address]
        found = dict(enumerate(comm.allgather_obj(own)))
        del found[comm.rank]
        others = {rank: RankAddress(*each) for rank, each in found.items()}
        peers.start(comm.rank, others, dict(enumerate(comm.topology.hosts)))
        comm.flight_recorder.peers = peers
    _warn_about_fallback(comm)
    if is_recorded:
        recording.start(comm, Path(os.environ[RECORD_VARIABLE]))  # an observer from now on
    if quiet and comm.rank != 0 and not has_terminal():
        _drop_standard_output(comm)
    comm.logger(__name__).debug("communicator of %d ranks: %s", comm.size, comm.settings)
    return comm


def _drop_standard_output(comm: Communicator) -> None:
    """Discard ``sys.stdout`` of this process until the communicator is finalized. Local."""
    shown, nowhere = sys.stdout, open(os.devnull, "w")  # noqa: SIM115 - until `finalize`
    sys.stdout = nowhere

    def restore() -> None:
        if sys.stdout is nowhere:  # the script may have replaced it since then
            sys.stdout = shown
        nowhere.close()

    comm.on_finalize(restore)


def _warn_about_fallback(comm: Communicator) -> None:
    """Warn if sums between hosts use another library, for want of TCP. *Collective.*

    All ranks add it to `Communicator.reason`; rank 0 also warns.
    """
    if comm.inter_size == 1 or comm.device.type != "cpu":
        return
    link = None if comm.route.inter_node_group is None else comm.route.inter_node_group.transport
    own = link.fallback_reason if isinstance(link, TcpTransport) else ""
    found = [missing for missing in comm.allgather_obj(own) if missing]
    if not found:
        return
    text = f"no TCP connections between hosts: {found[0]}; large messages are slower"
    comm.reason = f"{comm.reason}; {text}" if comm.reason else text
    comm.logger(__name__).warning(
        "%s: %s. Up to %d ranks that send between hosts are connected; 'hierarchical' has one of "
        "them per host. Check that no firewall blocks free ports and that GLOO_SOCKET_IFNAME "
        "names the interface between the hosts.",
        comm.rank_label,
        text,
        MAX_PEERS + 1,
    )


def _warn_if_hashes_differ(hashes: set[int]) -> None:
    """Warn if ranks hash strings differently, so that sets have different orders."""
    if len(hashes) > 1:
        warn(
            "The ranks hash strings differently, so that list(set(labels)) has another order on "
            "each of them, silently. Set PYTHONHASHSEED=0 for all ranks before they start, as "
            "torchmn run does.",
            ResultWarning,
        )


def _limits(given: float | Timeout) -> tuple[Timeout, float]:
    """The limits, and the limit at the beginning in seconds. Raises UsageError."""
    if not isinstance(given, Timeout):
        if not 0 <= given < float("inf"):
            raise UsageError(
                f"timeout_s={given} must be a finite number of seconds, or 0 for no limit."
            )
        own_s = given or _NO_LIMIT_S
        given = Timeout(own_s, own_s)
    longer_s = min(_NO_LIMIT_S, _FIRST_FACTOR * given.unreachable_s)
    return given, longer_s if given.first_s is None else given.first_s


def _world(transport: str | Transport, timeout_s: float) -> tuple[Transport, bool]:
    """The transport of all ranks, and whether the caller passed it as an argument."""
    if isinstance(transport, Transport):
        return transport, True
    launched = own_place()
    if launched is not None and launched.known_size != 1:
        require_linux("A communicator of several ranks")
    kind = choose_transport(transport, launched, os.environ, has_cuda=torch.cuda.is_available())
    return join_world(kind, timeout_s), False


def _own_part(
    world: Transport, topology: Topology, device: torch.device, timeout_s: float, *, has_rdma: bool
) -> Transport:
    """The transport of one communicator, split from the world. *Collective.*

    Between hosts torchmn's TCP connections need fewer cycles than gloo, and MPI over Ethernet
    reaches about half of a link's rate (21 to 27 of 39 Mb/s, 0.53 of 0.93 Gb/s, 2.9 of 4.9 Gb/s).
    If a host has a network other than Ethernet, MPI is kept, because it can use it.
    """
    # Counted, so that each has a key of its own: all ranks make their communicators in one order.
    _num_created[id(world)] += 1
    key = f"communicator{_num_created[id(world)]}"
    limit = TimeLimit(timeout_s)
    own = world.split(range(world.size), key, limit)
    uses_ethernet = isinstance(own, TorchDistributedTransport) or (
        isinstance(own, MpiTransport) and not has_rdma
    )
    if device.type == "cpu" and len(topology.nodes) > 1 and uses_ethernet:
        return TcpTransport.connect(own, limit)
    return own


def _trust(own: Transport) -> Trust:
    secret = os.environ.get(SECRET_VARIABLE)
    return Trust(is_private=own.is_trusted, secret=secret.encode() if secret else None)


def _codec_of(dtype: torch.dtype | str | None) -> Codec | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    raise_if_unknown("allreduce_grad_dtype", name, get_args(GradDtype))
    return create_codec(name)


def _exchange_greetings(
    world: Transport, greeting: dict[str, Any], timeout_s: float
) -> list[dict[str, Any]]:
    """Gather facts about each rank and compare the greetings of all ranks. *Collective.*

    The facts of a rank are its ``host``, the ``gpus`` that it may use (the first digits of their
    UUIDs), whether its host has a network other than Ethernet (``rdma``), whether it ``records``
    its steps, and the ``hash`` of a string.

    Raises RankMismatchError: the greetings differ.
    """
    facts = {
        "host": socket.gethostname(),
        "gpus": _visible_gpus(),
        "rdma": bool(rdma_adapters()),
        "records": recording.wants_record(os.environ),
        "hash": hash("torchmn"),
    }
    rows = gather_json(world, [facts, greeting], TimeLimit(timeout_s))
    raise_if_values_differ(
        "Ranks called create_communicator()",
        [theirs for _, theirs in rows],
        "All ranks must give the same arguments and run the same versions.",
    )
    return [facts for facts, _ in rows]


def _checked_topology(given: Topology | None, found_hosts: list[str], world: Transport) -> Topology:
    if given is not None:
        if given.size != world.size:
            raise TopologyError(
                f"The given topology has {given.size} ranks, the world has {world.size}. "
                "Pass a topology with one host name per rank."
            )
        return given
    topology = Topology(tuple(found_hosts))
    launched = own_place()
    if launched is not None and launched.known_size == world.size:
        _raise_if_nodes_differ(launched, topology.place(world.rank), found_hosts)
    return topology


def _raise_if_nodes_differ(
    launched: LauncherInfo, place: RankPlacement, found_hosts: list[str]
) -> None:
    """Raise TopologyError if the launcher's nodes differ from those by host name.

    Containers on different hosts may have the same name. If the launcher gives the number of ranks
    of a node, their order is not compared: Open MPI numbers those beyond the number of cores first.
    """
    if launched.intra_size is not None:
        given, found = f"one of {launched.intra_size} on its node", f"one of {place.intra_size}"
        is_same = launched.intra_size == place.intra_size
    else:
        given, found = f"number {launched.intra_rank} on its node", f"number {place.intra_rank}"
        is_same = launched.intra_rank in (None, place.intra_rank)
    if not is_same:
        raise TopologyError(
            f"According to {launched.launcher} rank {place.rank} is {given}, but according to the "
            f"host names ({', '.join(found_hosts)}) it is {found}. Give every node its own host "
            "name, or pass topology=."
        )


def _visible_gpus() -> list[str]:
    """The GPUs that this process may use, by UUID. Does not create a CUDA context."""
    if os.environ.get(BACKEND_VARIABLE) == "gloo" or not torch.cuda.is_available():
        return []
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [str(each.uuid).replace("-", "")[:_UUID_DIGITS] for each in properties]


def gpus_in_use(topology: Topology, gpus: Sequence[Sequence[str]]) -> list[str]:
    """The GPU assigned to each rank, from those that it may use; empty if no rank has a GPU.

    The ranks of a node are assigned its GPUs in turn. A pure function of facts that are the same on
    every rank. Raises UnsupportedError on all ranks: some ranks have a GPU and some have none.
    """
    without = [rank for rank, own in enumerate(gpus) if not own]
    if len(without) == topology.size:
        return []
    if without:
        with_one = next(rank for rank, own in enumerate(gpus) if own)
        raise UnsupportedError(
            f"rank {without[0]} on {topology.hosts[without[0]]} finds no GPU and rank {with_one} "
            f"on {topology.hosts[with_one]} does: ranks train either all on GPUs or all on CPUs. "
            "Check CUDA_VISIBLE_DEVICES and the builds of torch (torchmn doctor), or train on CPUs "
            "with torchmn run --backend gloo."
        )
    return [own[topology.place(rank).intra_rank % len(own)] for rank, own in enumerate(gpus)]


def _own_device(
    topology: Topology, gpus: Sequence[Sequence[str]], world: Transport, *, is_own: bool
) -> torch.device:
    """The device of this rank. A GPU is made the current device and passed to the transport.

    NCCL connects the ranks if each has a GPU of its own. ``is_own``: ``world`` was made by the
    caller and becomes the transport of the communicator.
    """
    used = gpus_in_use(topology, gpus)
    if not used:
        return torch.device("cpu")
    place = topology.place(world.rank)
    device = torch.device("cuda", place.intra_rank % len(gpus[world.rank]))
    # Before any other CUDA call, which would create a context, and use memory, on GPU 0.
    torch.cuda.set_device(device)
    if isinstance(world, TorchDistributedTransport):
        may_share = may_share_gpus(os.environ)
        problem = shared_gpu_problem(len(used), len(set(used)), may_share=may_share)
        may_use_nccl = not problem and (world.has_nccl or not is_own)
        world.use_gpu(device, may_use_nccl=may_use_nccl)
    return device


# The choice of route and transport for ``name="auto"``.
#
# On one node there are fixed rules. Between nodes the candidates are timed on a few sums of a
# buffer that is large enough to compare bandwidths: it is not known in advance whether several
# ranks of a node achieve more bandwidth than one.

_NUM_TRIALS = 3
_TRIAL_BYTES = MiB
_MARGIN = 1.1  # a later candidate must be faster by this factor


def candidate_routes(
    topology: Topology, device: torch.device, *, has_nccl: bool = True
) -> dict[str, str]:
    """Candidate routes by name, each with the reason, the most promising one first.

    A pure function of facts that are the same on every rank. ``has_nccl``: whether the transport
    uses NCCL for GPUs, which it does not over MPI or if ranks share a GPU.
    """
    if device.type == "cuda" and has_nccl:
        return {"pure_nccl": "every rank has a GPU, and NCCL chooses its own paths"}
    if len(topology.nodes) == 1:
        return {"single_node": f"all {topology.size} ranks share a node"}
    routes = {"hierarchical": f"{topology}: sum in the node before anything crosses the network"}
    if topology.is_balanced and topology.size > len(topology.nodes):
        routes["two_dimensional"] = (
            f"{topology}: the ranks of a node together carry more between nodes than one of them"
        )
    return routes


def fastest(candidates: Mapping[str, Callable[[], Communicator]]) -> tuple[str, Communicator, str]:
    """Make and time all candidates; returns the name and communicator kept, and the times as text.

    *Collective.* The others are finalized. The first is kept unless another is clearly faster.
    """
    made = {name: make() for name, make in candidates.items()}
    if len(made) == 1:
        [(name, comm)] = made.items()
        return name, comm, ""
    seconds = {name: _sum_s(comm) for name, comm in made.items()}
    first, *_ = made
    # `_sum_s` returns the same numbers on all ranks, so all keep the same candidate.
    best = min(made, key=lambda name: seconds[name] * (1.0 if name == first else _MARGIN))
    for name, comm in made.items():
        if name != best:
            comm.finalize()
    measured = ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in seconds.items())
    return best, made[best], f"a sum of {_TRIAL_BYTES // MiB} MB took: {measured}"


def _sum_s(comm: Communicator) -> float:
    """Seconds of the fastest of some sums, on the slowest rank; the same number on all ranks."""
    buffer = comm.route.new_buffer(_TRIAL_BYTES // 4, torch.float32, torch.device("cpu"))
    comm.route.sum_(buffer)
    times = []
    for _ in range(_NUM_TRIALS):
        comm.barrier()
        started = time.perf_counter()
        comm.route.sum_(buffer)
        times.append(time.perf_counter() - started)
    return float(
        comm.allreduce(torch.tensor([min(times)], dtype=torch.float64, device="cpu"), "max")
    )
