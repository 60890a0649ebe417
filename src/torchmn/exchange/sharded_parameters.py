"""Models of which each rank holds a part: agreement among these ranks, and exchange of the parts.

The ranks that together hold one model must act alike: end a block at the same step, use the same
weight, and skip a step if any part is not finite. To agree, they sum a few numbers over the axes of
the device mesh of the parameters, or over the communicators of parallel layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchmn.base.errors import ResultWarning
from torchmn.base.torch_private import HooksOfWhole, made_as
from torchmn.base.warn import warn
from torchmn.comm import Communicator
from torchmn.comm.local_tensors import division_of, from_part, is_distributed, local_part


class ModelMesh:
    """The ranks that together hold some parameters. *Collective over the ranks of the model.*

    The numbers on which they agree go through host memory if the mesh's groups have gloo. With a
    group that has only NCCL the host waits for the GPU.
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
        """Number of ranks that hold one model together."""

    @property
    def has_parallel_layers(self) -> bool:
        """Whether some parameters are parts of parallel layers: plain tensors, not DTensors."""
        return bool(self._comms)

    def means(self, *values: float) -> tuple[float, ...]:
        """The mean of each value over the ranks of the model, bit-identical on all of them."""
        if self.size == 1:
            return values
        return tuple(total / self.size for total in self._sum(*values))

    def mean_weights(
        self, weight: float, num_samples: float, rank_label: str
    ) -> tuple[float, float]:
        """The means of weight and number of samples over the ranks of the model.

        Warns once if their weights differ.
        """
        mean, mean_samples, square = self.means(weight, num_samples, weight * weight)
        if square - mean * mean > 1e-9 * square and not self._has_warned:
            self._has_warned = True
            warn(
                f"{rank_label}: this rank has weight {weight:g}, and those that hold the same "
                f"model {mean:g} on average. fully_shard weights them equally, so that the "
                "gradient is not the mean over all samples. Give them batches of one size; or "
                "multiply each loss by its own weight over the average, and call "
                "optimizer.set_weight(average) on each.",
                ResultWarning,
            )
        return mean, mean_samples

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is True on any rank of the model."""
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
    """The device on which a group sums: the CPU if its configuration names gloo, else CUDA."""
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
# it has reduced a gradient over the ranks of its mesh, for some only at the end of the backward
# pass. On a GPU it calls them while its reduction stream is the current one, so that whatever a
# hook queues runs after the gradient; and a bucket waits for all streams that wrote into it.

NamedParameter = tuple[str, nn.Parameter]


class LocalShard(HooksOfWhole):
    """This rank's part of a DTensor parameter, sharing its memory. Local, except `grad`."""

    whole: nn.Parameter

    def __new__(cls, whole: nn.Parameter) -> LocalShard:
        """Create the shard of ``whole``, a DTensor."""
        shard: LocalShard = made_as(cls, local_part(whole).detach(), False)
        shard.whole = whole
        return shard

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalShard:
        raise TypeError("A LocalShard stands for a parameter of a model; copy that.")

    def follow(self) -> None:
        """Follow the part to its current memory, which `nn.Module.to` and others replace."""
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

        *Collective* over the mesh if the gradient is placed differently from the parameter: it is
        first redistributed. That of a replicated parameter whose layer saw a part of the sequence,
        for instance, is summed.
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
    """The `LocalShard` of each DTensor parameter; the same object each time. Local."""

    def __init__(self) -> None:
        self._of: dict[Tensor, LocalShard] = {}

    @property
    def exist(self) -> bool:
        """Whether there are DTensors among the parameters."""
        return bool(self._of)

    def of(self, parameter: Tensor) -> Tensor:
        """The shard of a DTensor; any other parameter is returned as it is."""
        shard = self._of.get(parameter)
        if shard is None and is_distributed(parameter):
            shard = self._of[parameter] = LocalShard(cast(nn.Parameter, parameter))
        return parameter if shard is None else shard

    def named(self, parameters: Iterable[NamedParameter]) -> list[NamedParameter]:
        """The same parameters, with shards in place of DTensors."""
        return [(name, cast(nn.Parameter, self.of(parameter))) for name, parameter in parameters]

    def follow(self) -> None:
        """Call `LocalShard.follow` of every shard."""
        for shard in self._of.values():
            shard.follow()


def whole_of(parameter: Tensor) -> Tensor:
    """The parameter as the model has it: for a `LocalShard` its DTensor. Local."""
    return parameter.whole if isinstance(parameter, LocalShard) else parameter
