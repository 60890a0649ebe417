"""The weight of a rank in a mean, and its samples, counted where they are seen.

A hook counts them before the model's forward. A forward that is run again inside of backward, as
activation checkpointing does, is not counted again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchmn.data.batch_size import num_samples
from torchmn.exchange.sample_proportions import BatchShares, Shares


class Contribution:
    """The weight of a rank and its samples, from one exchange (or step) to the next. Local.

    A plain object without properties that `count` writes to: where a forward is compiled so is the
    hook, and what it does to such an object is done at every call of the compiled code.
    """

    def __init__(self, *, is_by_samples: bool = False) -> None:
        self.is_by_samples = is_by_samples
        self.mean_samples: float | None = None
        """The mean over ranks of `num_samples`, where all ranks know it: blocks end by it."""
        self.is_set = False
        """Whether the weight was given, so that what forward sees is not counted."""
        self.shares: BatchShares | None = None
        """Where loaders divide batches: compares what is counted with this rank's parts."""
        self.was_ever_known = False
        """Whether anything was counted or set since the beginning."""
        self._set_weight = self._set_samples = 0.0
        self._counted = 0.0
        self._num_forwards = 0
        self._has_counted = False
        """Whether a forward pass was counted since the last exchange and `zero_grad`."""
        self._before_zero_grad: float | None = None
        """What was counted before `zero_grad`, if anything was."""
        self._last_counted = 0.0
        """What the last exchange of this step has counted."""
        self.is_checked = False
        """Whether `is_miscounted` was asked for."""

    @property
    def num_samples(self) -> float:
        """What was set, or else what forward has seen."""
        if self.is_set:
            return self._set_samples
        return self._counted if self._has_counted else self._before_zero_grad or 0.0

    @property
    def weight(self) -> float:
        """Of this rank in the next mean."""
        if self.is_set:
            return self._set_weight
        if not self.is_by_samples:
            return 1.0
        # A second backward pass of the same forward pass: two losses, or a graph cut in two.
        return self.num_samples if self._is_counted else self._last_counted

    @property
    def _is_counted(self) -> bool:
        return self._has_counted or self._before_zero_grad is not None

    @property
    def is_known(self) -> bool:
        """Whether anything was counted or set since the last exchange or step."""
        return self.is_set or self._is_counted

    @property
    def given(self) -> tuple[float, float] | None:
        """What `set` was called with for the next exchange, if it was."""
        return (self._set_weight, self.num_samples) if self.is_set else None

    def set(self, weight: float, num_samples: float) -> None:
        """Stop counting until `reset`: it is known."""
        self._set_weight, self._set_samples = weight, num_samples
        self.is_set = self.was_ever_known = True

    def reset(self) -> None:
        """The exchange has taken it: the next one begins with nothing.

        But for the weight of a backward pass without a forward pass of its own, until `end_step`.
        """
        if self._is_counted:
            self._last_counted = self.num_samples
        self.is_set, self._counted, self._has_counted = False, 0.0, False
        self._num_forwards = 0
        self._before_zero_grad = self.mean_samples = None

    def zero_grad(self) -> None:
        """Gradients were cleared: forward passes before it count only if none comes after it.

        It may come between a forward pass and its backward pass. Others, of an evaluation or of a
        batch that was left out, have no part in the gradients of the passes that follow.
        """
        if self._has_counted:
            self._before_zero_grad = self._counted
            self._counted, self._has_counted = 0.0, False
            self._num_forwards = 0

    def compare(self, num_samples: float) -> Shares | None:
        """What to compare with the parts of batches, in an exchange of ``num_samples``."""
        if self.is_set or self.shares is None:
            return None
        return self.shares.of(num_samples, self._num_forwards)

    def is_miscounted(self, shares: Shares | None) -> bool:
        """Whether forward has seen no multiple of what a loader gave, asked for the first time."""
        is_first, self.is_checked = not self.is_checked, True
        if not is_first or shares is None or shares.loaders:
            return False
        num_samples = self.num_samples
        parts = [part for part in shares.own if part]
        return all(num_samples % part for part in parts) if parts else num_samples > 0

    def resume(self, num_samples: float) -> None:
        """Continue counting from ``num_samples``."""
        self._counted, self._has_counted = num_samples, True

    def end_step(self) -> None:
        """If a rank has no data in the next step, its weight there is zero."""
        self._last_counted = 0.0

    def count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass: its arguments are the fields of a batch, see `num_samples`."""
        if not (module.training and torch.is_grad_enabled()) or self.is_set:
            return
        # Compiled code cannot ask; compiled whole, a checkpointed part is not called again.
        if not torch.compiler.is_compiling() and (
            torch._C._current_graph_task_id() != -1 or torch._C._is_tracing()
        ):
            return
        found = num_samples((*args, *kwargs.values()))
        if found is not None:
            self.add(found)

    def add(self, num_samples: int) -> None:
        """Count samples, unless the weight was set."""
        if not self.is_set:
            self._counted += num_samples
            self._num_forwards += 1
            self.was_ever_known = self._has_counted = True


_COUNT_RULE = (
    "What a rank counts is the first size of the first tensor that forward is given; here that is "
    "not the batch, or there are other samples in it. Call optimizer.set_weight(number_of_samples) "
    "before each backward(), or pass weight='samples' if the loss is a mean over what is counted."
)


def miscount(num_samples: float) -> str:
    """What is wrong where `Contribution.is_miscounted`, and the cure."""
    return (
        "the model's forward saw no multiple of the samples of its batch of scatter_loader in the "
        f"first pass (here it saw {num_samples:g}). {_COUNT_RULE}"
    )


def disproportion(num_samples: float, num_all: float, shares: Shares) -> str:
    """What is wrong where `BatchShares.is_proportional` is not so, and the cure."""
    if shares.loaders:
        parts = " and ".join(f"{own} of {total}" for own, total in shares.loaders)
        return (
            f"this step has batches of several loaders of scatter_loader, of which this rank's "
            f"parts are {parts}: not in proportion on all ranks, and one weight cannot be right "
            "for a loss of each. Use batch sizes that are multiples of the number of ranks, with "
            "drop_last=True, or call the model once, with the batches put together."
        )
    return (
        f"the model's forward saw {num_samples:g} samples here and {num_all:g} on all ranks, and "
        f"this rank's part of the batch of scatter_loader is {shares.own[0]} of "
        f"{shares.totals[0]}: not in proportion on all ranks, so that the mean of gradients would "
        f"have wrong weights. {_COUNT_RULE}"
    )
