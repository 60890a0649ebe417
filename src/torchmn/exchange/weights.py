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
from torchmn.data.divided_batches import DividedBatches
from torchmn.exchange.step_batches import NOTHING, Counted, Share, StepBatches


class Contribution:
    """The weight of a rank and its samples, from one exchange (or step) to the next. Local.

    Args:
        is_by_samples: whether the samples that are counted are the weight.
        loaders: what loaders divide among the ranks.
        size: the number of ranks.

    A plain object without properties that `count` writes to: where a forward is compiled so is the
    hook, and what it does to such an object is done at every call of the compiled code.
    """

    def __init__(
        self, *, is_by_samples: bool = False, loaders: DividedBatches | None = None, size: int = 1
    ) -> None:
        self.is_by_samples = is_by_samples
        self.loaders, self._size = loaders, size
        self.mean_samples: float | None = None
        """The mean over ranks of `num_samples`, where all ranks know it: blocks end by it."""
        self.is_set = False
        """Whether the weight was given, so that what forward sees is not counted."""
        self.batches: StepBatches | None = None
        """The batches of loaders, once there is a loader that divides batches."""
        self.is_joining = False
        """Whether ranks may receive different numbers of batches."""
        self.follows_batches = False
        """Whether the script left weights to the library: those of batches are used."""
        self.was_ever_known = False
        """Whether anything was counted or set since the beginning."""
        self.share: Share | None = None
        """What the exchange under way is of, if that is batches of loaders."""
        self._set_weight = self._set_samples = 0.0
        self._counted = self._squares = 0.0
        self._num_forwards = 0
        self.has_counted = False
        """Whether a forward pass was counted since the last exchange and `zero_grad`."""
        self._before_zero_grad = NOTHING
        """What was counted before `zero_grad`, as one forward pass."""
        self._last_counted = 0.0
        """What the last exchange of this step has counted."""
        if loaders is not None:
            loaders.when_used(self, Contribution._loader_is_there)

    def _loader_is_there(self) -> None:
        assert self.loaders is not None  # noqa: S101 - it has called this
        self.batches = StepBatches(self.loaders, self._size)

    @property
    def num_samples(self) -> float:
        """What was set, or else of batches of loaders, or else what forward has seen."""
        if self.is_set:
            return self._set_samples
        return self._num_counted if self.share is None else self.share.weight

    @property
    def _num_counted(self) -> float:
        return self._counted if self.has_counted else self._before_zero_grad.num_samples

    @property
    def weight(self) -> float:
        """Of this rank in the next mean."""
        if self.is_set:
            return self._set_weight
        if self.share is not None:
            return self.share.weight
        if not self.is_by_samples:
            return 1.0
        # A second backward pass of the same forward pass: two losses, or a graph cut in two.
        return self._num_counted if self._is_counted else self._last_counted

    @property
    def loss_weight(self) -> float | None:
        """The weight as far as it is known in backward; None if it is not that of batches."""
        if self.is_set:
            return self._set_weight
        share = self.share
        if share is None and self.batches is not None and self.follows_batches:
            share = self.batches.look(self._seen())
        return None if share is None else share.weight

    @property
    def _is_counted(self) -> bool:
        return self.has_counted or self._before_zero_grad is not NOTHING

    @property
    def is_known(self) -> bool:
        """Whether anything was counted or set since the last exchange or step."""
        return self.is_set or self._is_counted or self.share is not None

    @property
    def given(self) -> tuple[float, float] | None:
        """What `set` was called with for the next exchange, if it was."""
        return (self._set_weight, self._set_samples) if self.is_set else None

    def set(self, weight: float, num_samples: float) -> None:
        """Stop counting until `reset`: it is known."""
        self._set_weight, self._set_samples = weight, num_samples
        self.is_set = self.was_ever_known = True

    def begin_exchange(self, step: int, *, has_backward: bool) -> None:
        """Fix the weight of the exchange that begins. Local.

        Args:
            step: steps of the optimizer so far.
            has_backward: whether a backward pass of this rank has begun it.
        """
        if self.batches is not None:
            share = self.batches.take(
                NOTHING if self.is_set else self._seen(),
                step,
                is_used=has_backward and not self.is_set,
                is_joining=self.is_joining,
            )
            self.share = share if self.follows_batches and not self.is_set else None

    def _seen(self) -> Counted:
        if self.has_counted:
            return Counted(self._counted, self._num_forwards, self._squares)
        return self._before_zero_grad

    def reset(self) -> None:
        """The exchange has taken it: the next one begins with nothing.

        But for the weight of a backward pass without a forward pass of its own, until `end_step`.
        """
        if self._is_counted:
            self._last_counted = self._num_counted
        self.is_set = False
        self._forget_count()
        self._before_zero_grad, self.mean_samples, self.share = NOTHING, None, None

    def zero_grad(self) -> None:
        """Gradients were cleared: forward passes before it count only if none comes after it.

        It may come between a forward pass and its backward pass. Others, of an evaluation or of a
        batch that was left out, have no part in the gradients of the passes that follow.
        """
        if self.has_counted:
            self._before_zero_grad = Counted(self._counted, 1, self._counted**2)
            self._forget_count()

    def _forget_count(self) -> None:
        self._counted = self._squares = 0.0
        self._num_forwards, self.has_counted = 0, False

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
            self._squares += num_samples**2
            self._num_forwards += 1
            self.was_ever_known = self.has_counted = True
