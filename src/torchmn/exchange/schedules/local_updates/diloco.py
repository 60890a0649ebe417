"""DiLoCo: an outer optimizer uses the mean pseudo-gradient of a block as its gradient.

    a <- outer.step(gradient = d)        by default SGD, lr 0.7, Nesterov momentum 0.9:
    b <- 0.9 b + d;    a <- a - 0.7 (d + 0.9 b)

The inner optimizer is any, AdamW in the paper, and keeps its state over blocks.

Sources: Douillard et al., *DiLoCo: Distributed Low-Communication Training of Language Models*,
2023; *Streaming DiLoCo with Overlapping Communication*, 2025 (``num_fragments``, ``overlap_steps``;
see `local_updates.base` for the differences). The form goes back to Reddi et al., *Adaptive
Federated Optimization*, 2021. Difference: the mean is weighted by samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchmn.base.errors import UsageError
from torchmn.exchange.replicas import raise_if_ranks_differ
from torchmn.exchange.schedules.local_updates.base import IntraNode, LocalUpdateSchedule
from torchmn.exchange.schedules.local_updates.fragments import PseudoGradient
from torchmn.exchange.schedules.local_updates.outer_momentum import OuterState
from torchmn.exchange.schedules.trial_step import trial_step

RECOMMENDED_OVERLAP = 6
"""Number of steps of overlap that is recommended for blocks of 16 steps."""
MakeOptimizer = Callable[[list[Tensor]], Optimizer]


def nesterov(parameters: list[Tensor]) -> Optimizer:
    """The outer optimizer of the paper: SGD with learning rate 0.7 and Nesterov momentum 0.9."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def nesterov_of_recipe(parameters: list[Tensor]) -> Optimizer:
    """The outer optimizer of `DiLoCo.recommended`: learning rate 0.7, Nesterov momentum 0.7."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.7, nesterov=True)


class DiLoCo(LocalUpdateSchedule):
    """Blocks of ``block_size`` samples, each ended by a step of an outer optimizer.

    Args:
        block_size: see `LocalUpdateSchedule`, also for the last four arguments.
        outer: creates the outer optimizer for a list of tensors, the anchors, and must do the same
            on all ranks. The attribute ``outer`` then holds the optimizer, for instance for a
            learning rate scheduler.

    Raises UsageError: an argument is out of range; when the multi-node optimizer is created
    RankMismatchError: the ranks' outer optimizers have different classes or options.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> adamw = torch.optim.AdamW(model.parameters())
        >>> schedule = DiLoCo(block_size=65536, overlap_steps=2, num_fragments=2)
        >>> optimizer = torchmn.create_multi_node_optimizer(adamw, comm, model, schedule=schedule)
    """

    name = "diloco"
    outer: Optimizer

    def __init__(
        self,
        block_size: float | None = None,
        *,
        outer: MakeOptimizer = nesterov,
        overlap_steps: int = 0,
        num_fragments: int = 1,
        eager: bool = False,
        intra_node: IntraNode | None = None,
    ) -> None:
        super().__init__(
            block_size,
            overlap_steps=overlap_steps,
            num_fragments=num_fragments,
            eager=eager,
            intra_node=intra_node,
        )
        self._make_outer = outer

    @classmethod
    def recommended(
        cls,
        block_size: float | None = None,
        *,
        overlap_steps: int = RECOMMENDED_OVERLAP,
        num_fragments: int = 1,
        intra_node: IntraNode | None = None,
    ) -> DiLoCo:
        """Settings for overlapped blocks that lose less accuracy than those of the paper.

        With ``codec="int8"`` a short training run loses 0.6 points (0.0 to 1.2) of test accuracy
        compared with `EveryStep`, instead of 2.7. Use `EveryStep` if none may be lost.

        The outer momentum is 0.7 instead of the paper's 0.9, and is applied eagerly. Use fewer
        steps of overlap if the link allows it: about the time of an exchange divided by that of a
        step. ``docs/explain/recipes.md`` tells how these settings were chosen and measured.
        """
        return cls(
            block_size,
            outer=nesterov_of_recipe,
            overlap_steps=overlap_steps,
            num_fragments=num_fragments,
            eager=True,
            intra_node=intra_node,
        )

    def on_anchors_created(self) -> None:
        before = getattr(self, "outer", None)
        self.outer = self._make_outer(list(self.anchors.values()))
        if len(self.outer.param_groups) != 1:
            raise UsageError(
                f"outer= made an optimizer with {len(self.outer.param_groups)} parameter groups. "
                "Pass it the list that it is called with, as one group."
            )
        if before is not None:  # parameters were added: keep the state of the others
            kept = {k: v for k, v in before.param_groups[0].items() if k != "params"}
            self.outer.param_groups[0].update(kept)
            for anchor in self.anchors.values():
                if anchor in before.state:
                    self.outer.state[anchor] = before.state[anchor]
        raise_if_ranks_differ(self._comm, [], self.outer, {})
        self._initial_state = self.outer.state_dict()

    def outer_step(self, pseudo_gradients: Sequence[PseudoGradient], num_samples: float) -> None:
        for each in pseudo_gradients:
            each.anchor.grad = each.mean
        self.outer.step()  # skips anchors without a gradient: other fragments
        for each in pseudo_gradients:
            each.anchor.grad = None

    def _momentum(self, zeros: Sequence[PseudoGradient]) -> list[Tensor]:
        with trial_step(self.outer):  # its counts of steps as well
            return super()._momentum(zeros)

    def outer_state_tensors(self, pseudo_gradients: Sequence[PseudoGradient]) -> OuterState:
        state = self.outer.state
        return {
            (each.name, key): value
            for each in pseudo_gradients
            for key, value in state.get(each.anchor, {}).items()
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        }

    def outer_state_dict(self) -> dict[str, Any]:
        return {"outer": self.outer.state_dict()}

    def load_outer_state_dict(self, state: dict[str, Any]) -> None:
        # A copy: torch's optimizers keep using the tensors that they load.
        self.outer.load_state_dict(copy.deepcopy(state.get("outer", self._initial_state)))
