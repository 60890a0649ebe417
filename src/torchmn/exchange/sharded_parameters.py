"""The ranks that hold one model among them, of whose parameters each holds a part.

All of them must do the same: end a block at the same step, weight their parts identically, and give
up a step where any part is not finite. What they agree on is a few numbers, summed over the axes of
the mesh on which the parameters lie, or over the communicators of parallel layers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchmn.base.torch_private import HooksOfWhole, made_as
from torchmn.comm import Communicator
from torchmn.comm.local_tensors import division_of, from_part, is_distributed, local_part


class ModelMesh:
    """The axes of the meshes of some parameters. *Collective over the ranks of the model.*

    What they agree on goes through host memory where the groups of the mesh allow it. A group of
    NCCL alone has the host wait for the GPU.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        divisions: dict[Communicator, None] = {}
        for parameter in parameters:
            division = division_of(parameter)
            if division is not None and division.comm.size > 1:
                divisions[division.comm] = None
            mesh: Any = getattr(parameter, "device_mesh", None)
            if mesh is None:
                continue
            for dim in range(mesh.ndim):
                group = mesh.get_group(dim)
                groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
        self._groups = [group for ranks, group in groups.items() if len(ranks) > 1]
        self._devices = [_device_of(group) for group in self._groups]
        self._comms = list(divisions)
        self._has_warned = False
        self.size = math.prod(g.size() for g in self._groups) * math.prod(
            comm.size for comm in self._comms
        )
        """How many ranks hold the model."""

    @property
    def has_parallel_layers(self) -> bool:
        """Whether some parameters are plain tensors of which other ranks hold other parts."""
        return bool(self._comms)

    def means(self, *values: float) -> tuple[float, ...]:
        """Each value's mean over the ranks of the model, the same bits on all."""
        if self.size == 1:
            return values
        return tuple(total / self.size for total in self._sum(*values))

    def mean_weights(
        self, weight: float, num_samples: float, rank_label: str
    ) -> tuple[float, float]:
        """This rank's weight and samples, each the mean over the ranks of the model.

        Warns once of weights that differ among them.
        """
        mean, mean_samples, square = self.means(weight, num_samples, weight * weight)
        if square - mean * mean > 1e-9 * square and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{rank_label}: this rank has weight {weight:g}, and those that hold the same "
                f"model {mean:g} on average. fully_shard weights them equally, so that the "
                "gradient is not the mean over all samples. Give them batches of one size; or "
                "multiply each loss by its own weight over the average, and call "
                "optimizer.set_weight(average) on each.",
                RuntimeWarning,
                stacklevel=2,
            )
        return mean, mean_samples

    def any(self, flag: bool) -> bool:
        """Whether it is True on any rank of the model."""
        return self._sum(float(flag))[0] > 0 if self.size > 1 else flag

    def _sum(self, *values: float) -> list[float]:
        totals = torch.tensor(values, dtype=torch.float64, device="cpu")
        for group, device in zip(self._groups, self._devices, strict=True):
            there = totals.to(device)
            dist.all_reduce(there, group=group)
            totals = there.cpu()
        for comm in self._comms:
            totals = comm.allreduce(totals)
        return totals.tolist()


def _device_of(group: dist.ProcessGroup) -> str:
    """Where a group can sum: on the CPU if it has gloo, as "cpu:gloo,cuda:nccl" or "gloo"."""
    return "cpu" if "gloo" in dist.get_backend_config(group) else "cuda"


# ---- how this rank exchanges its own part ----
#
# A parameter of `fully_shard` or `parallelize_module` is a DTensor. Each rank holds a part of it,
# and the ranks that hold the same part of the other copies of the model are its counterparts: these
# are the ranks of the communicator. What they exchange is a gradient of the size of the part.
#
# A `LocalShard` stands for such a parameter wherever gradients are laid out, summed and averaged.
# Its memory is that of the part, and its ``grad`` that of the parameter's: all of that code is
# written for parameters that are whole. What the optimizer and the script see stays the DTensor.
#
# ``p.grad`` is final when torch calls the parameter's hooks: `fully_shard` calls them itself once
# it has reduced a gradient over the ranks of its mesh, at the end of the backward pass for some.
# On a GPU it does so on the stream on which it reduces, which is then the current one: what a hook
# queues comes after the gradient, and a bucket waits for all streams that wrote into it.

NamedParameter = tuple[str, nn.Parameter]


class LocalShard(HooksOfWhole):
    """This rank's part of a DTensor parameter, in its memory. Local, but for `grad`."""

    whole: nn.Parameter

    def __new__(cls, whole: nn.Parameter) -> LocalShard:
        """What stands for ``whole``, a DTensor."""
        shard: LocalShard = made_as(cls, local_part(whole).detach(), False)
        shard.whole = whole
        return shard

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalShard:
        raise TypeError("A LocalShard stands for a parameter of a model; copy that.")

    def follow(self) -> None:
        """Continue in the memory that the part has now: `nn.Module.to` and others replace it."""
        local = local_part(self.whole).detach()
        if (local.data_ptr(), local.dtype, local.shape) != (
            self.data_ptr(),
            self.dtype,
            self.shape,
        ):
            self.data = local

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the parameter is trained."""
        return self.whole.requires_grad

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of the parameter's gradient.

        *Collective* over the mesh where the gradient is not placed as the parameter is, as that of
        a replicated parameter whose layer saw a part of the sequence: it is then summed first.
        """
        grad = self.whole.grad
        if grad is None or grad.requires_grad or not is_distributed(grad):
            return grad
        if grad.placements != self.whole.placements:  # type: ignore[attr-defined]
            placements = self.whole.placements  # type: ignore[attr-defined]
            with torch.no_grad():
                grad = grad.redistribute(placements=placements)  # type: ignore[attr-defined]
                local = local_part(grad)
                self.whole.grad = grad = from_part(local, self.whole)
        return local_part(grad)

    @grad.setter
    def grad(self, local: Tensor | None) -> None:
        self.whole.grad = None if local is None else from_part(local, self.whole)


class LocalShards:
    """The `LocalShard` of each DTensor parameter, the same one each time. Local."""

    def __init__(self) -> None:
        self._of: dict[Tensor, LocalShard] = {}

    @property
    def exist(self) -> bool:
        """Whether there are DTensors among the parameters."""
        return bool(self._of)

    def of(self, parameter: Tensor) -> Tensor:
        """What stands for a parameter: itself, unless it is a DTensor."""
        shard = self._of.get(parameter)
        if shard is None and is_distributed(parameter):
            shard = self._of[parameter] = LocalShard(cast(nn.Parameter, parameter))
        return parameter if shard is None else shard

    def named(self, parameters: Iterable[NamedParameter]) -> list[NamedParameter]:
        """The same parameters, with shards in place of DTensors."""
        return [(name, cast(nn.Parameter, self.of(parameter))) for name, parameter in parameters]

    def follow(self) -> None:
        """See `LocalShard.follow`."""
        for shard in self._of.values():
            shard.follow()


def whole_of(parameter: Tensor) -> Tensor:
    """The parameter that the optimizer and the model have. Local."""
    return parameter.whole if isinstance(parameter, LocalShard) else parameter
