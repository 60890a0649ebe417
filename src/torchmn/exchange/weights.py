"""The weight of a rank in a mean, and its samples, counted where they are seen.

A hook counts them before the model's forward. A forward that is run again inside of backward, as
activation checkpointing does, is not counted again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchmn.base.torch_private import current_graph_task_id, is_tracing
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
        self.batches: BatchShares | None = None
        """Where the script left weights to the library: the batches of loaders."""
        self.was_ever_known = False
        """Whether anything was counted or set since the beginning."""
        self.shares: Shares | None = None
        """What the exchange under way is of, if that is batches of loaders."""
        self._set_weight = self._set_samples = 0.0
        self._counted = 0.0
        self._num_forwards = 0
        self.has_counted = False
        """Whether a forward pass was counted since the last exchange and `zero_grad`."""
        self._before_zero_grad: float | None = None
        """What was counted before `zero_grad`, if anything was."""
        self._last_counted = 0.0
        """What the last exchange of this step has counted."""

    @property
    def num_samples(self) -> float:
        """What was set, or else of batches of loaders, or else what forward has seen."""
        if self.is_set:
            return self._set_samples
        return self._num_counted if self.shares is None else self.shares.weight

    @property
    def _num_counted(self) -> float:
        return self._counted if self.has_counted else self._before_zero_grad or 0.0

    @property
    def _num_calls(self) -> int:
        """Forward passes that the samples are of; before `zero_grad` they count as one."""
        return self._num_forwards or int(self._before_zero_grad is not None)

    @property
    def weight(self) -> float:
        """Of this rank in the next mean."""
        if self.is_set:
            return self._set_weight
        if self.shares is not None:
            return self.shares.weight
        if not self.is_by_samples:
            return 1.0
        # A second backward pass of the same forward pass: two losses, or a graph cut in two.
        return self._num_counted if self._is_counted else self._last_counted

    @property
    def loss_weight(self) -> float | None:
        """The weight as far as it is known in backward; None if it is not that of batches."""
        shares = self.shares
        if shares is None and self.batches is not None and not self.is_set:
            shares = self.batches.look(self._num_counted, self._num_calls)
        return self._set_weight if self.is_set else None if shares is None else shares.weight

    @property
    def _is_counted(self) -> bool:
        return self.has_counted or self._before_zero_grad is not None

    @property
    def is_known(self) -> bool:
        """Whether anything was counted or set since the last exchange or step."""
        return self.is_set or self._is_counted or self.shares is not None

    @property
    def given(self) -> tuple[float, float] | None:
        """What `set` was called with for the next exchange, if it was."""
        return (self._set_weight, self._set_samples) if self.is_set else None

    def set(self, weight: float, num_samples: float) -> None:
        """Stop counting until `reset`: it is known."""
        self._set_weight, self._set_samples = weight, num_samples
        self.is_set = self.was_ever_known = True

    def begin_exchange(self, *, has_backward: bool) -> None:
        """Fix the weight of the exchange that begins. Local.

        ``has_backward``: whether a backward pass of this rank has begun it.
        """
        if self.batches is not None and self.batches.are_used:
            counted, is_used = self._num_counted, has_backward
            if self.is_set:
                counted, is_used = 0.0, False
            shares = self.batches.take(counted, self._num_calls, is_used=is_used)
            self.shares = None if self.is_set else shares

    def reset(self) -> None:
        """The exchange has taken it: the next one begins with nothing.

        But for the weight of a backward pass without a forward pass of its own, until `end_step`.
        """
        if self._is_counted:
            self._last_counted = self._num_counted
        self.is_set, self._counted, self.has_counted = False, 0.0, False
        self._num_forwards = 0
        self._before_zero_grad = self.mean_samples = self.shares = None

    def zero_grad(self) -> None:
        """Gradients were cleared: forward passes before it count only if none comes after it.

        It may come between a forward pass and its backward pass. Others, of an evaluation or of a
        batch that was left out, have no part in the gradients of the passes that follow.
        """
        if self.has_counted:
            self._before_zero_grad = self._counted
            self._counted, self.has_counted = 0.0, False
            self._num_forwards = 0

    def resume(self, num_samples: float) -> None:
        """Continue counting from ``num_samples``."""
        self._counted, self.has_counted = num_samples, True

    def end_step(self) -> None:
        """If a rank has no data in the next step, its weight there is zero."""
        self._last_counted = 0.0

    def count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass: its arguments are the fields of a batch, see `num_samples`."""
        if not (module.training and torch.is_grad_enabled()) or self.is_set:
            return
        # Compiled code cannot ask; compiled whole, a checkpointed part is not called again.
        if not torch.compiler.is_compiling() and (current_graph_task_id() != -1 or is_tracing()):
            return
        found = num_samples((*args, *kwargs.values()))
        if found is not None:
            self.add(found)

    def add(self, num_samples: int) -> None:
        """Count samples, unless the weight was set."""
        if not self.is_set:
            self._counted += num_samples
            self._num_forwards += 1
            self.was_ever_known = self.has_counted = True
