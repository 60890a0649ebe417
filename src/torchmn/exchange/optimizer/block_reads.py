"""A warning, given once, if a model is read in the middle of a block of local updates.

There each rank has trained alone since the last exchange, so that a script evaluates or saves the
model of a single rank. Evaluations (a forward pass in eval mode without gradients) and `state_dict`
are noticed. In train mode under ``torch.no_grad()`` both are part of training: samples drawn by
reinforcement learning, a moving average, a target network.

To resume within a block every rank saves its model together with the optimizer's state. So the
warning about `state_dict` waits for the next step.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from torchmn.base.errors import ResultWarning
from torchmn.base.warn import warn
from torchmn.comm import Communicator
from torchmn.exchange.model_hooks import ModelHooks
from torchmn.exchange.schedules.base import Schedule


class BlockReads:
    """Notices by ``hooks`` what the script reads of models. Local."""

    def __init__(self, comm: Communicator, schedule: Schedule, hooks: ModelHooks) -> None:
        self._comm, self._schedule, self._hooks = comm, schedule, hooks
        self._has_warned = False
        self._owed: list[str] = []
        """The text of a warning that a model's state was read, or nothing. It is dropped if the
        optimizer's state is saved or loaded as well, since both together continue the block."""
        self._is_checkpoint = False
        self._at_exit = partial(_warn, self._owed)  # no step follows if a script ends by saving

    def watch(self, models: Sequence[nn.Module]) -> None:
        """Notice reads of these models from now on."""
        atexit.register(self._at_exit)
        for model in models:
            self._hooks.before_forward(model, self._forward_begins)
            self._hooks.before_state_dict(model, self._state_is_read)

    def note_checkpoint(self) -> None:
        """Note that the optimizer's state is saved or loaded."""
        self._is_checkpoint = True
        self._owed.clear()

    def end_step(self) -> None:
        """Give a warning that is due, after the optimizer has stepped."""
        self._is_checkpoint = False
        self._has_warned |= bool(self._owed)
        _warn(self._owed)

    def close(self) -> None:
        """Give a warning that is due, and stop, as the optimizer is closed."""
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
                "ends the block with the mean of all. In a training session, let frequency be a "
                "multiple of block_size, and that one of the minibatch size. (A checkpoint that "
                "every rank saves, to resume within the block, has optimizer.state_dict() as well.)"
            )


def _warn(owed: list[str]) -> None:
    if owed:
        warn(owed.pop(), ResultWarning)
