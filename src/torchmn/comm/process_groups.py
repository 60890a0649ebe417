"""torch's process groups and device meshes over the ranks of a communicator.

`fully_shard`, `parallelize_module` and torch's pipelines take a `DeviceMesh`, which needs groups of
torch's default world. That world is made here where the script has not made one, with the server
that the ranks of the job have met at; under MPI its gloo groups stand beside MPI.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from torchmn.cluster.launcher_env import read_launcher_env
from torchmn.comm.transports.join import meet
from torchmn.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from torchmn.comm.base import Communicator


def make_process_group(comm: Communicator) -> dist.ProcessGroup:
    """A group of `torch.distributed` of the same ranks, in the same order. *Collective.*

    Raises UnsupportedError: ranks are threads, or not in the order of torch's default world.
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
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    return cast("dist.ProcessGroup", group)


def torch_ranks(comm: Communicator) -> list[int]:
    """The numbers of these ranks in torch's default world. *Collective.*"""
    return comm.allgather_obj(dist.get_rank())


def mesh_of_groups(
    groups: Sequence[dist.ProcessGroup], names: Sequence[str], ranks: Tensor, device_type: str
) -> DeviceMesh:
    """A mesh with a group for each axis. Local. ``ranks``: (size of axis 0, size of axis 1, ...)"""
    from torch.distributed.device_mesh import DeviceMesh

    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=tuple(names))
    return DeviceMesh.from_group(list(groups), device_type, mesh=ranks, mesh_dim_names=tuple(names))


def _make_default_world(comm: Communicator) -> None:
    """The default group of torch.distributed, of all processes of the job. *Collective.*"""
    launched = read_launcher_env(os.environ)
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
    _, server = meet(launched, comm.first_timeout_s)
    atexit.register(_destroy_default_world)
    dist.init_process_group(
        backend,
        store=PrefixStore("torchmn default world", server),
        rank=launched.rank,
        world_size=launched.size,
        timeout=timeout,
    )


def _destroy_default_world() -> None:
    """Before Python finalizes: threads of gloo groups that still exist would end it by SIGABRT."""
    if dist.is_initialized():
        dist.destroy_process_group()
