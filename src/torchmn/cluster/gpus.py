"""Find the NVIDIA GPUs that this process may use, without a library. Changes nothing."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path

from torchmn.cluster.environment_variables import SHARE_GPU_VARIABLE
from torchmn.cluster.units import counted


def count_gpus(env: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return the number of GPUs, limited by ``CUDA_VISIBLE_DEVICES``. Local.

    Device files are counted, since importing a framework would take seconds. As in CUDA, the
    variable's list ends at its first entry that is not a device.

    Example:
        >>> count_gpus({"CUDA_VISIBLE_DEVICES": ""})
        0
    """
    numbers = {path.name[6:] for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdigit()}
    num_gpus = len(numbers)
    if num_gpus == 0 and (devices / "dxg").exists():  # Windows' subsystem for Linux
        num_gpus = 1
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_gpus
    named = takewhile(
        lambda name: name.startswith(("GPU-", "MIG-")) or _is_number_below(name, num_gpus),
        map(str.strip, visible.split(",")),
    )
    return len(list(named)) if num_gpus else 0


def _is_number_below(text: str, end: int) -> bool:
    return text.isdigit() and int(text) < end


def may_share_gpus(env: Mapping[str, str]) -> bool:
    """Whether the user allows several ranks on one GPU, which NCCL refuses by default.

    Example:
        >>> may_share_gpus({})
        False
    """
    return env.get(SHARE_GPU_VARIABLE) == "1"


def shared_gpu_problem(num_ranks: int, num_gpus: int, *, may_share: bool) -> str:
    """Return why NCCL refuses ranks that have so many GPUs together; empty if it does not.

    ``may_share``: see `may_share_gpus`.

    Example:
        >>> shared_gpu_problem(2, 2, may_share=False)
        ''
        >>> shared_gpu_problem(2, 1, may_share=False).partition(" (")[0]
        'NCCL needs a GPU for each of the 2 ranks'
    """
    if num_gpus >= num_ranks or (may_share and num_gpus):
        return ""
    cure = f" ({SHARE_GPU_VARIABLE}=1 lets them share one, for tests)" if num_gpus else ""
    return f"NCCL needs a GPU for each of the {counted(num_ranks, 'rank')}{cure}"


def shared_gpu_variables(env: Mapping[str, str], rank: str) -> dict[str, str]:
    """Return variables that let ranks share a GPU with NCCL, if `may_share_gpus`; else none.

    NCCL 2.30 has a switch for this. With earlier versions each rank pretends to be on a host of its
    own, so that messages go through sockets. Variables that the user has set are kept.

    Example:
        >>> shared_gpu_variables({}, "0")
        {}
    """
    if not may_share_gpus(env):
        return {}
    chosen = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    if not _has_shared_gpus(env):
        chosen |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    return {name: text for name, text in chosen.items() if name not in env}


def _has_shared_gpus(env: Mapping[str, str]) -> bool:
    """Whether NCCL is 2.30 or later; a preloaded one is taken to be, else torch's counts."""
    if "nccl" in env.get("LD_PRELOAD", ""):
        return True  # who replaces NCCL does it for that
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            major, minor = version(package).split(".")[:2]
        except PackageNotFoundError:
            continue
        return (int(major), int(minor)) >= (2, 30)
    return False


_GPUS = "proc/driver/nvidia/gpus"
_PCI = "sys/bus/pci/devices"
_NODES = "sys/devices/system/node"


@dataclass(frozen=True, kw_only=True)
class GpuLocality:
    """The numbers of the cores next to a GPU, and its memory node, -1 if there is only one."""

    bus: str
    cores: frozenset[int]
    memory_node: int = -1


def gpu_localities(env: Mapping[str, str], root: Path = Path("/")) -> tuple[GpuLocality, ...]:
    """Return the localities of the GPUs that this process may use, in CUDA's order. Local.

    CUDA's order is assumed to be the order on the bus, as it is for GPUs of one kind. Empty if the
    driver reports nothing, or if CUDA_VISIBLE_DEVICES does not name GPUs by number.

    Example:
        >>> gpu_localities({"CUDA_VISIBLE_DEVICES": ""})  # no GPU
        ()
    """
    folder = root / _GPUS
    buses = sorted(path.name.lower() for path in folder.iterdir()) if folder.is_dir() else []
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = map(str.strip, visible.split(","))
        named = takewhile(lambda name: _is_number_below(name, len(buses)), names)
        buses = [buses[int(name)] for name in list(named)]
    return tuple(_around(bus, root) for bus in buses)


def memory_nodes(cores: frozenset[int], root: Path = Path("/")) -> tuple[int, ...]:
    """Return the memory nodes that these cores belong to; empty if the system has none. Local.

    >>> import pathlib, tempfile
    >>> from torchmn.cluster.gpus import memory_nodes
    >>> memory_nodes(frozenset({0}), pathlib.Path(tempfile.mkdtemp()))  # a system that has none
    ()
    """
    folder = root / _NODES
    if not folder.is_dir():
        return ()
    nodes = []
    for path in folder.glob("node[0-9]*"):
        if cores & parse_core_list(text_of(path / "cpulist")):
            nodes.append(int(path.name[4:]))
    return tuple(sorted(nodes))


def parse_core_list(text: str) -> frozenset[int]:
    """Parse a list of cores in the kernel's format. Empty if the text is something else.

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
    node = text_of(device / "numa_node")
    return GpuLocality(
        bus=bus,
        cores=parse_core_list(text_of(device / "local_cpulist")),
        memory_node=int(node) if re.fullmatch(r"-?\d+", node) else -1,
    )


def text_of(path: Path) -> str:
    """Read a file of the system, without blanks around its text; empty if it does not exist."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
