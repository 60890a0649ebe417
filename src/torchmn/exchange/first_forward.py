"""The first forward pass in training mode of models, with which training begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchmn.comm.training_start import training_start
from torchmn.compiling import not_compiled
from torchmn.exchange.model_hooks import ModelHooks


class FirstForward:
    """Begins training at the first forward pass in training mode of a model or a part of it. Local.

    Those that are called by compiled code are not seen; the first step of the optimizer is.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._hooks = ModelHooks()
        if not training_start.is_awaited:
            return
        for module in {module: None for model in models for module in model.modules()}:
            if not isinstance(module, torch.jit.ScriptModule):
                self._hooks.before_forward(module, self._before_forward, prepend=True)

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
            self._begin_unless_drawn_twice()

    @not_compiled
    def _begin_unless_drawn_twice(self) -> None:
        """Begin, but not in a part under activation checkpointing, nor while tracing.

        Checkpointing draws the numbers of a part again in the backward pass, after it has set the
        generators to where they were when the part began.
        """
        is_in_backward = torch._C._current_graph_task_id() != -1
        packs_tensors = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if not (is_in_backward or packs_tensors or torch._C._is_tracing()):
            self.begin()

    def begin(self) -> None:
        """Training begins, if it has not begun before."""
        self.close()
        training_start.begin()

    def close(self) -> None:
        """Look at no more forward passes; calling it again does nothing."""
        self._hooks.remove()
