"""What a rank puts into the next mean: its weight, and how many samples are behind it.

The samples are counted where they are seen, by a hook before the model's forward. A forward that
is run again inside of backward, as activation checkpointing does, is not counted again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Contribution:
    """The weight of a rank and its samples, from one exchange (or step) to the next. Local.

    A plain object without properties that `count` writes to: where a forward is compiled so is the
    hook, and what it does to such an object is done at every call of the compiled code.
    """

    def __init__(self, *, is_by_samples: bool = False) -> None:
        self.is_by_samples = is_by_samples
        self.num_samples = 0.0
        """What was set, or else what the forward has seen."""
        self.is_set = False
        """Whether the weight was given, so that what forward sees is not counted."""
        self.was_ever_known = False
        """Whether anything was counted or set since the beginning."""
        self._set_weight = 0.0
        self._has_counted = False
        """Whether a forward pass was counted since the last exchange."""
        self._last_counted = 0.0
        """What the last exchange of this step has counted."""

    @property
    def weight(self) -> float:
        """Of this rank in the next mean."""
        if self.is_set:
            return self._set_weight
        if not self.is_by_samples:
            return 1.0
        # A second backward pass of the same forward pass: two losses, or a graph cut in two.
        return self.num_samples if self._has_counted else self._last_counted

    @property
    def given(self) -> tuple[float, float] | None:
        """What `set` was called with for the next exchange, if it was."""
        return (self._set_weight, self.num_samples) if self.is_set else None

    def set(self, weight: float, num_samples: float) -> None:
        """Count no more until `reset`: it is known."""
        self._set_weight, self.num_samples = weight, num_samples
        self.is_set = self.was_ever_known = True

    def reset(self) -> None:
        """The exchange has taken it: the next one begins with nothing.

        But for the weight of a backward pass without a forward pass of its own, until `end_step`.
        """
        if self._has_counted:
            self._last_counted = self.num_samples
        self.is_set, self.num_samples, self._has_counted = False, 0.0, False

    def resume(self, num_samples: float) -> None:
        """Go on counting from so many."""
        self.num_samples, self._has_counted = num_samples, True

    def end_step(self) -> None:
        """A rank without data in the next step has no weight there."""
        self._last_counted = 0.0

    def count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass: its samples are the first size of its first tensor."""
        if not (module.training and torch.is_grad_enabled()) or self.is_set:
            return
        # Compiled code cannot ask; compiled whole, a checkpointed part is not called again.
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.dim():
                self.num_samples += value.shape[0]
                self.was_ever_known = self._has_counted = True
                return
