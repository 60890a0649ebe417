"""A model that is read in the middle of a block of local updates: a warning, once.

There each rank has trained alone since the last exchange, and what a script evaluates or saves is
one rank's model. Seen are evaluations (a forward pass in eval mode without gradients) and
`state_dict`. Under ``torch.no_grad()`` in train mode both are part of training: samples drawn by
reinforcement learning, a moving average, a target network.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchmn.comm import Communicator
from torchmn.exchange.model_hooks import ModelHooks
from torchmn.exchange.schedules.base import Schedule


class BlockReads:
    """Watches models from now on, by ``hooks``. Local."""

    def __init__(
        self,
        comm: Communicator,
        schedule: Schedule,
        models: Sequence[nn.Module],
        hooks: ModelHooks,
    ) -> None:
        self._comm, self._schedule, self._has_warned = comm, schedule, False
        self.is_checkpoint = False
        """Whether the optimizer's state was saved or loaded since the last step: together with the
        model's it continues the block."""
        for model in models:
            hooks.before_forward(model, self._forward_begins)
            hooks.before_state_dict(model, self._state_is_read)

    def _forward_begins(self, module: nn.Module, *_: Any) -> None:
        if not (torch.compiler.is_compiling() or module.training or torch.is_grad_enabled()):
            self._warn("evaluated")

    def _state_is_read(self, module: nn.Module) -> None:
        if not self.is_checkpoint and (torch.is_grad_enabled() or not module.training):
            self._warn("saved")

    def _warn(self, what: str) -> None:
        if self._schedule.is_within_block and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._comm.rank_label}: the model is {what} in the middle of a block of "
                f"{self._schedule.name}: since the last exchange each rank has trained alone, and "
                "this is the model of one rank. Call optimizer.flush() on all ranks before, which "
                "ends the block with the mean of all. (Checkpoints that every rank saves to resume "
                "within a block take optimizer.state_dict() first, and then that of the model.)",
                stacklevel=4,
            )
