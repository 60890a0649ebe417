"""Which rank this process is: that of a process group of the script's own, or of its launcher.

A default group of several processes, as `torch.multiprocessing.spawn` and `init_process_group` with
``rank=`` make it, is adopted: its ranks, its store, and NCCL only if it has NCCL. It stays the
script's: its collectives are not used, and it is not destroyed.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings

import torch.distributed as dist

from torchmn.base.errors import TopologyError
from torchmn.cluster.launcher_env import LauncherInfo, read_launcher_env

_GROUP = "init_process_group()"


def own_place() -> LauncherInfo | None:
    """The rank and size of this process; ``None`` if nothing says that it is one of several. Local.

    The variables of a launcher count if they describe this process. In a child of multiprocessing
    they are those of its parent, and Lightning sets WORLD_SIZE without RANK.

    Raises TopologyError: the group and the launcher contradict each other.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    has_only_size = "RANK" not in os.environ and os.environ.get("WORLD_SIZE") == str(size)
    if size == 1 and not (has_only_size and dist.is_initialized()):
        return read_launcher_env(os.environ)
    said = (("rank", str(rank)), ("world_size", str(size)))
    group = LauncherInfo(launcher=_GROUP, kind="agents", rank=rank, known_size=size, variables=said)
    if has_only_size or multiprocessing.parent_process() is not None:
        return group
    launched = read_launcher_env(os.environ)
    if launched is None or launched.known_size in (None, 1):
        return group
    if (launched.rank, launched.known_size) != (rank, size):
        raise TopologyError(
            f"{launched}, but {group}. Call init_process_group() without rank= and world_size=, so "
            "that it reads the launcher's variables, or start the script without that launcher."
        )
    return launched


def is_adopted(place: LauncherInfo | None) -> bool:
    """Whether the rank is that of the script's process group, not of a launcher."""
    return place is not None and place.launcher == _GROUP


def warn_if_alone_among_children() -> None:
    """Warn in a process of multiprocessing that has an address to meet at, but no rank."""
    address = os.environ.get("MASTER_ADDR")
    if address and not os.environ.get("RANK") and multiprocessing.parent_process() is not None:
        warnings.warn(
            f"{multiprocessing.current_process().name} makes a communicator of this process alone, "
            f"rank 0 of 1: MASTER_ADDR={address} is set, but it has no rank. To train with the "
            "processes beside it, call torch.distributed.init_process_group(rank=, world_size=) "
            "before create_communicator(), or start the ranks with torchmn run or launch_local.",
            RuntimeWarning,
            stacklevel=6,
        )
