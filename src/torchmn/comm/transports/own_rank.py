"""The rank of this process, from the script's own process group or from the launcher.

A default process group of several processes, such as scripts make with
`torch.multiprocessing.spawn` and `init_process_group` with ``rank=``, is adopted: torchmn uses its
ranks and its store, and NCCL only if it has NCCL. The group still belongs to the script: its
collectives are not used, and it is not destroyed.
"""

from __future__ import annotations

import multiprocessing
import os

import torch.distributed as dist

from torchmn.base.errors import ResultWarning, TopologyError
from torchmn.base.warn import warn
from torchmn.cluster.launcher_env import LauncherInfo, read_launcher_env

_GROUP = "init_process_group()"


def own_place() -> LauncherInfo | None:
    """The rank and size of this process; None if there is no sign of other ranks. Local.

    The variables of a launcher are used if they describe this process. A child of multiprocessing
    inherits those of its parent, and Lightning sets WORLD_SIZE without RANK.

    Raises TopologyError: the process group and the launcher contradict each other.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    has_only_size = "RANK" not in os.environ and os.environ.get("WORLD_SIZE") == str(size)
    if size == 1 and not (has_only_size and dist.is_initialized()):
        return read_launcher_env(os.environ)
    said = (("rank", str(rank)), ("world_size", str(size)))
    group = LauncherInfo(launcher=_GROUP, kind="agents", rank=rank, known_size=size, variables=said)
    # A child of multiprocessing inherits variables that describe the rank of its parent.
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
    """Whether a rank comes from the script's process group and not from a launcher."""
    return place is not None and place.launcher == _GROUP


def warn_if_alone_among_children() -> None:
    """Warn in a child of multiprocessing that has MASTER_ADDR but no rank."""
    address = os.environ.get("MASTER_ADDR")
    if address and not os.environ.get("RANK") and multiprocessing.parent_process() is not None:
        warn(
            f"{multiprocessing.current_process().name} makes a communicator of this process alone, "
            f"rank 0 of 1: MASTER_ADDR={address} is set, but it has no rank. To train with the "
            "processes beside it, call torch.distributed.init_process_group(rank=, world_size=) "
            "before create_communicator(), or start the ranks with torchmn run or launch_local.",
            ResultWarning,
        )
