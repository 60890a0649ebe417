"""DiLoCo: an outer optimizer takes the mean movement of a block for a gradient.

    a <- outer.step(gradient = d)        by default SGD, lr 0.7, Nesterov momentum 0.9:
    b <- 0.9 b + d;    a <- a - 0.7 (d + 0.9 b)

The inner optimizer is any, AdamW in the paper, and keeps its state over blocks.

Sources: Douillard et al., *DiLoCo: Distributed Low-Communication Training of Language Models*,
2023; *Streaming DiLoCo with Overlapping Communication*, 2025 (``num_fragments``, ``overlap_steps``;
see `block_schedule` for what differs). The form goes back to Reddi et al., *Adaptive Federated
Optimization*, 2021. Difference: the mean is weighted by samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchmn.errors import UsageError
from torchmn.schedules.local_updates.base import BlockSchedule, InsideNode
from torchmn.schedules.local_updates.fragments import Movement
from torchmn.schedules.local_updates.partial_block import Remembered

MakeOptimizer = Callable[[list[Tensor]], Optimizer]


def nesterov(parameters: list[Tensor]) -> Optimizer:
    """The outer optimizer of the paper: SGD with learning rate 0.7 and Nesterov momentum 0.9."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(BlockSchedule):
    """Blocks of ``block_size`` samples, at whose ends an outer optimizer steps.

    Args:
        block_size: see `BlockSchedule`, as for the last four.
        outer: makes the outer optimizer for a list of tensors, the anchors. The same on all ranks.
            It is `self.outer` then, for instance for a learning rate scheduler.
        distributed_after: in samples over all workers.
    """

    name = "diloco"
    outer: Optimizer

    def __init__(
        self,
        block_size: float | None = None,
        *,
        outer: MakeOptimizer = nesterov,
        distributed_after: float = 0,
        overlap_steps: int = 0,
        num_fragments: int = 1,
        inside_node: InsideNode | None = None,
    ) -> None:
        super().__init__(
            block_size,
            distributed_after=distributed_after,
            overlap_steps=overlap_steps,
            num_fragments=num_fragments,
            inside_node=inside_node,
        )
        self._make_outer = outer

    def _anchors_laid_out(self) -> None:
        before = getattr(self, "outer", None)
        self.outer = self._make_outer(list(self.anchors.values()))
        if len(self.outer.param_groups) != 1:
            raise UsageError(
                f"outer= made an optimizer with {len(self.outer.param_groups)} groups of "
                "parameters. Give it the list it is called with, as one group."
            )
        if before is not None:  # parameters were added: go on with what there was
            kept = {k: v for k, v in before.param_groups[0].items() if k != "params"}
            self.outer.param_groups[0].update(kept)
            for anchor in self.anchors.values():
                if anchor in before.state:
                    self.outer.state[anchor] = before.state[anchor]
        self._blank = self.outer.state_dict()

    def _move_(self, movements: Sequence[Movement], num_samples: float) -> None:
        for movement in movements:
            movement.anchor.grad = movement.mean
        self.outer.step()  # leaves out what has no gradient: other fragments
        for movement in movements:
            movement.anchor.grad = None

    def _remembered(self, movements: Sequence[Movement]) -> Remembered:
        return {
            (movement.name, key): value
            for movement in movements
            for key, value in self.outer.state.get(movement.anchor, {}).items()
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        }

    def _recipe_state(self) -> dict[str, Any]:
        return {"outer": self.outer.state_dict()}

    def _load_recipe_state(self, state: dict[str, Any]) -> None:
        # A copy: torch's optimizers go on in the tensors that they load.
        self.outer.load_state_dict(copy.deepcopy(state.get("outer", self._blank)))
