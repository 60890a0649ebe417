"""A model that is read in the middle of a block of local updates: a warning, once.

There each rank has trained alone since the last exchange, and what a script evaluates or saves is
one rank's model. Seen are evaluations (a forward pass in eval mode without gradients) and
`state_dict`. Under ``torch.no_grad()`` in train mode both are part of training: samples drawn by
reinforcement learning, a moving average, a target network.

A state is also saved by every rank, with that of the optimizer, to resume within a block: so the
warning waits for the next step.
"""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from torchmn.comm import Communicator
from torchmn.exchange.model_hooks import ModelHooks
from torchmn.exchange.schedules.base import Schedule


class BlockReads:
    """What the script reads of models, by ``hooks``. Local."""

    def __init__(self, comm: Communicator, schedule: Schedule, hooks: ModelHooks) -> None:
        self._comm, self._schedule, self._hooks = comm, schedule, hooks
        self._has_warned = False
        self._owed: list[str] = []
        """A warning of a model's state, if the optimizer's is not saved or loaded beside it: both
        together continue the block."""
        self._is_checkpoint = False
        self._at_exit = partial(_warn, self._owed)  # of a script that ends by saving

    def watch(self, models: Sequence[nn.Module]) -> None:
        """Notice reads of these from now on."""
        atexit.register(self._at_exit)
        for model in models:
            self._hooks.before_forward(model, self._forward_begins)
            self._hooks.before_state_dict(model, self._state_is_read)

    def note_checkpoint(self) -> None:
        """The optimizer's state is saved or loaded."""
        self._is_checkpoint = True
        self._owed.clear()

    def end_step(self) -> None:
        """What was read is complete: the optimizer has stepped."""
        self._is_checkpoint = False
        self._has_warned |= bool(self._owed)
        _warn(self._owed)

    def close(self) -> None:
        """The optimizer is closed."""
        self.end_step()
        atexit.unregister(self._at_exit)

    def _forward_begins(self, module: nn.Module, *_: Any) -> None:
        if not (torch.compiler.is_compiling() or module.training or torch.is_grad_enabled()):
            self._note("evaluated")
            self.end_step()

    def _state_is_read(self, module: nn.Module) -> None:
        if not self._is_checkpoint and (torch.is_grad_enabled() or not module.training):
            self._note("saved")

    def _note(self, what: str) -> None:
        traits = self._schedule.traits
        if traits.is_within_block and not (self._has_warned or self._owed):
            self._owed.append(
                f"{self._comm.rank_label}: the model was {what} in the middle of a block of "
                f"{self._schedule.name}: since the last exchange each rank has trained alone, and "
                "this is the model of one rank. Call optimizer.flush() on all ranks before, which "
                "ends the block with the mean of all. (A checkpoint that every rank saves, to "
                "resume within the block, has optimizer.state_dict() as well.)"
            )


def _warn(owed: list[str]) -> None:
    if owed:
        warnings.warn(owed.pop(), stacklevel=4)
