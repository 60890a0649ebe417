"""The choice of route and transport for ``name="auto"``.

On one node there are fixed rules. Between nodes the candidates are timed on a few sums of a buffer
that is large enough to compare bandwidths: gloo and MPI differ by a factor of two over the same
link, and whether several ranks of a node get more out of it than one is not known in advance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from torchmn.cluster import Topology
from torchmn.cluster.units import MiB
from torchmn.comm.base import Communicator

_NUM_TRIALS = 3
_TRIAL_BYTES = MiB
_MARGIN = 1.1  # a later candidate must be faster by this factor


def candidate_routes(
    topology: Topology, device: torch.device, *, has_nccl: bool = True
) -> dict[str, str]:
    """Names of routes, each with the reason, the most likely one first.

    A pure function of facts that are the same on every rank. ``has_nccl``: whether the transport
    uses NCCL for GPUs; not over MPI, nor where ranks share a GPU.
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
    """Make and time all candidates and keep one: its name, itself, and the measurements.

    *Collective.* The others are finalized. The first is kept unless another is clearly faster.
    """
    made = {name: make() for name, make in candidates.items()}
    if len(made) == 1:
        [(name, comm)] = made.items()
        return name, comm, ""
    seconds = {name: _sum_s(comm) for name, comm in made.items()}
    first, *_ = made
    best = min(made, key=lambda name: seconds[name] * (1.0 if name == first else _MARGIN))
    for name, comm in made.items():
        if name != best:
            comm.finalize()
    measured = ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in seconds.items())
    return best, made[best], f"a sum of {_TRIAL_BYTES // MiB} MB took: {measured}"


def _sum_s(comm: Communicator) -> float:
    """Seconds of one sum, the minimum of some, on the slowest rank: the same on all ranks."""
    buffer = comm.new_buffer(_TRIAL_BYTES // 4, torch.float32, torch.device("cpu"))
    comm.sum_(buffer)
    times = []
    for _ in range(_NUM_TRIALS):
        comm.barrier()
        started = time.perf_counter()
        comm.sum_(buffer)
        times.append(time.perf_counter() - started)
    return float(
        comm.allreduce(torch.tensor([min(times)], dtype=torch.float64, device="cpu"), "max")
    )
