"""Detection of the first forward pass in training mode, with which training begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchmn.base.compiling import not_compiled
from torchmn.base.torch_private import current_graph_task_id, is_tracing, packs_saved_tensors
from torchmn.comm.training_start import training_start
from torchmn.exchange.model_hooks import ModelHooks


def watch_first_forward(models: Sequence[nn.Module]) -> ModelHooks:
    """Begin training at the first forward pass in training mode of a model or a part of it. Local.

    Returns the hooks, which remove themselves then. Passes inside compiled code are not seen.
    Passes under activation checkpointing do not count: it runs them again in backward, after
    setting the random generators back to their state at the beginning of the checkpointed part.
    """
    hooks = ModelHooks()

    @not_compiled
    def begin() -> None:
        is_in_backward = current_graph_task_id() != -1
        packs_tensors = packs_saved_tensors()
        if not (is_in_backward or packs_tensors or is_tracing()):
            hooks.remove()
            training_start.begin()

    def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
            begin()

    if training_start.function is not None:
        for module in {module: None for model in models for module in model.modules()}:
            if not isinstance(module, torch.jit.ScriptModule):
                # Before hooks of the script, which may already draw the random numbers of training.
                hooks.before_forward(module, before_forward, prepend=True)
    return hooks
