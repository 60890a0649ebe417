"""The ranks that hold one model among them, of whose parameters each holds a part.

All of them must do the same: end a block at the same step, weight their parts identically, and give
up a step where any part is not finite. What they agree on is a few numbers, summed over the axes of
the mesh on which the parameters lie, or over the communicators of parallel layers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchmn.comm import Communicator
from torchmn.comm.local_tensors import division_of
from torchmn.errors import UnsupportedError


class ModelMesh:
    """The axes of the meshes of some parameters. *Collective over the ranks of the model.*

    Raises UnsupportedError: they are sharded on GPUs.
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
            if mesh.device_type != "cpu":
                raise UnsupportedError(
                    f"Sharded parameters (DTensors) on {mesh.device_type} are not exchanged yet: "
                    "fully_shard reduces their gradients on a stream of its own, for which the "
                    "exchange would not wait. Use torch's HSDP there (fully_shard with a mesh of "
                    "two axes and a torch optimizer), or train on CPUs."
                )
            for dim in range(mesh.ndim):
                group = mesh.get_group(dim)
                groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
        self._groups = [group for ranks, group in groups.items() if len(ranks) > 1]
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
        for group in self._groups:
            dist.all_reduce(totals, group=group)
        for comm in self._comms:
            totals = comm.allreduce(totals)
        return totals.tolist()
