"""Which cores and which memory node lie next to a GPU, from sysfs. Reads, never changes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmn.topology.cpus import CpuAssignment, Processors, assign_cpus

_GPUS = "proc/driver/nvidia/gpus"
_PCI = "sys/bus/pci/devices"
_NODES = "sys/devices/system/node"


@dataclass(frozen=True, kw_only=True)
class GpuLocality:
    """What lies next to one GPU: cores by number, and the memory node, -1 if there is only one."""

    bus: str
    cores: frozenset[int]
    memory_node: int = -1


def gpu_localities(env: Mapping[str, str], root: Path = Path("/")) -> tuple[GpuLocality, ...]:
    """The neighbourhoods of the GPUs that this process may use, in CUDA's order. Local.

    CUDA's order is taken to be that of the bus, as it is for GPUs of one kind. Empty where the
    driver tells nothing, or where CUDA_VISIBLE_DEVICES names GPUs in another way than by number.
    """
    folder = root / _GPUS
    buses = sorted(path.name.lower() for path in folder.iterdir()) if folder.is_dir() else []
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = []
        for entry in visible.split(","):
            if not entry.strip().isdigit() or int(entry) >= len(buses):
                break
            chosen.append(buses[int(entry)])
        buses = chosen
    return tuple(_around(bus, root) for bus in buses)


def cores_near_gpu(
    processors: Processors,
    neighbourhoods: Sequence[GpuLocality],
    *,
    intra_rank: int,
    intra_size: int,
) -> tuple[CpuAssignment, GpuLocality | None]:
    """A rank's share of the cores next to its GPU, the ``intra_rank``-th one.

    Ranks whose GPUs have the same neighbours divide those. Where a rank has no GPU of its own, or
    no core next to it is ours, all ranks divide all cores: some bound well beside others that are
    not would only make the first ones wait.
    """
    own = [_within(processors, around.cores) for around in neighbourhoods[:intra_size]]
    if len(own) < intra_size or not all(own):
        return assign_cpus(processors, intra_rank=intra_rank, intra_size=intra_size), None
    sharing = [rank for rank in range(intra_size) if own[rank] == own[intra_rank]]
    physical = dict(zip(processors.logical, processors.physical, strict=True))
    near = Processors(
        logical=own[intra_rank],
        physical=tuple(physical[core] for core in own[intra_rank]),
        quota=(None if processors.quota is None else processors.quota * len(sharing) / intra_size),
    )
    share = assign_cpus(near, intra_rank=sharing.index(intra_rank), intra_size=len(sharing))
    return share, neighbourhoods[intra_rank]


def memory_nodes(cores: frozenset[int], root: Path = Path("/")) -> tuple[int, ...]:
    """The memory nodes that these cores belong to. Local; empty where the system has none."""
    folder = root / _NODES
    if not folder.is_dir():
        return ()
    nodes = []
    for path in folder.glob("node[0-9]*"):
        if cores & parse_core_list(_text(path / "cpulist")):
            nodes.append(int(path.name[4:]))
    return tuple(sorted(nodes))


def parse_core_list(text: str) -> frozenset[int]:
    """The cores of a list of the kernel. Empty if it is none.

    >>> sorted(parse_core_list("0-2,8"))
    [0, 1, 2, 8]
    """
    cores: set[int] = set()
    for part in text.strip().split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if ends is not None:
            cores.update(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    return frozenset(cores)


def _around(bus: str, root: Path) -> GpuLocality:
    device = root / _PCI / bus
    node = _text(device / "numa_node").strip()
    return GpuLocality(
        bus=bus,
        cores=parse_core_list(_text(device / "local_cpulist")),
        memory_node=int(node) if re.fullmatch(r"-?\d+", node) else -1,
    )


def _within(processors: Processors, cores: frozenset[int]) -> tuple[int, ...]:
    return tuple(core for core in processors.logical if core in cores)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
