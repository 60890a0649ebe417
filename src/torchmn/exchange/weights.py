"""The weight of a rank in a mean, and the counting of its samples.

A hook counts the samples before the model's forward. A forward that is run again inside backward,
as activation checkpointing does, is not counted again.
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
        is_by_samples: whether the number of counted samples is the weight.
        loaders: the batches that loaders divide among the ranks.
        size: the number of ranks.

    `count` writes to plain attributes only, not to properties: if the forward is compiled, so is
    this hook, and torch.compile replays writes to plain attributes at every call.
    """

    def __init__(
        self, *, is_by_samples: bool = False, loaders: DividedBatches | None = None, size: int = 1
    ) -> None:
        self.is_by_samples = is_by_samples
        self.loaders, self._size = loaders, size
        self.mean_samples: float | None = None
        """The mean over ranks of `num_samples`, if all ranks know it; it then decides when a block
        of local updates ends."""
        self.is_set = False
        """Whether the weight was given by `set`, so that samples are not counted."""
        self.batches: StepBatches | None = None
        """The batches of loaders, once there is a loader that divides batches."""
        self.is_joining = False
        """Whether ranks may receive different numbers of batches, as inside `join`."""
        self.follows_batches = False
        """Whether the parts of batches are the weights, as the script did not choose any."""
        self.was_ever_known = False
        """Whether samples were ever counted, or a weight ever set."""
        self.share: Share | None = None
        """This rank's part of the batches in the exchange under way; None without loaders."""
        self.given_weights: list[float] = []
        """The weights that the script gave for the passes since the last exchange, one after
        another."""
        self._set_weight = self._set_samples = 0.0
        self._counted = self._squares = 0.0
        self._num_forwards = 0
        self.has_counted = False
        """Whether a forward pass was counted since the last exchange and `zero_grad`."""
        self._before_zero_grad = NOTHING
        """The samples counted before `zero_grad`, as those of one forward pass."""
        self._last_counted = 0.0
        """The number of samples counted in the last exchange of this step."""
        if loaders is not None:
            loaders.when_used(self, Contribution._loader_is_there)

    def _loader_is_there(self) -> None:
        assert self.loaders is not None  # noqa: S101 - it has called this
        self.batches = StepBatches(self.loaders, self._size)

    @property
    def num_samples(self) -> float:
        """This rank's samples: those set, else those of loaders, else those seen by forward."""
        if self.is_set:
            return self._set_samples
        return self._num_counted if self.share is None else self.share.weight

    @property
    def _num_counted(self) -> float:
        return self._counted if self.has_counted else self._before_zero_grad.num_samples

    @property
    def weight(self) -> float:
        """The weight of this rank in the next mean."""
        if self.is_set:
            return self._set_weight
        if self.share is not None:
            return self.share.weight
        if not self.is_by_samples:
            return 1.0
        # Without a new forward pass this is a second backward pass of the last one, for another
        # loss or another part of the graph: it has the same samples.
        return self._num_counted if self._is_counted else self._last_counted

    @property
    def loss_weight(self) -> float | None:
        """The weight, as far as it is known during backward; None if it is neither set nor that of
        batches."""
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
        """The arguments of `set` for the next exchange; None if it was not called."""
        return (self._set_weight, self._set_samples) if self.is_set else None

    def set(self, weight: float, num_samples: float) -> None:
        """Set weight and samples of the next exchange; nothing is counted until `reset`."""
        self._set_weight, self._set_samples = weight, num_samples
        self.is_set = self.was_ever_known = True

    def begin_exchange(self, step: int, *, has_backward: bool) -> None:
        """Fix the weight of the exchange that begins. Local.

        Args:
            step: number of steps of the optimizer so far.
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
            if self.share is not None and self.share.num_all is not None:
                self.mean_samples = self.share.num_all / self._size

    def _seen(self) -> Counted:
        if self.has_counted:
            return Counted(self._counted, self._num_forwards, self._squares)
        return self._before_zero_grad

    def reset(self) -> None:
        """Start over after an exchange has taken weight and samples.

        The count is kept until `end_step` for a backward pass without a forward pass of its own.
        """
        if self._is_counted:
            self._last_counted = self._num_counted
        self.is_set = False
        self.given_weights.clear()
        self._forget_count()
        self._before_zero_grad, self.mean_samples, self.share = NOTHING, None, None

    def zero_grad(self) -> None:
        """Note that gradients were cleared: earlier forward passes count only if none follows.

        `zero_grad` may come between a forward pass and its backward pass. Other forward passes
        before it, of an evaluation or a batch that was left out, do not contribute to the
        gradients that follow.
        """
        self.given_weights.clear()
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
        """Forget the last count: a rank without data in the next step has weight 0 there."""
        self._last_counted = 0.0

    def count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the samples of a batch, the arguments of a forward pass; see `num_samples`.

        Registered as a hook before the model's forward.
        """
        if not (module.training and torch.is_grad_enabled()) or self.is_set:
            return
        # Compiled code cannot ask whether it runs inside backward. It need not: a checkpointed
        # part that is compiled with the model is not called again.
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
