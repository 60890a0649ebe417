"""The moment at which training begins in this process, for what waits for it: `seed_ranks`.

Random generators belong to the process, and so does this moment, whatever communicators it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from torchmn.compiling import leave_to_python, not_compiled


class TrainingStart:
    """Calls a function at the first forward pass in training mode of a model that is trained."""

    def __init__(self) -> None:
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._function: Callable[[], None] | None = None
        self._hook: RemovableHandle | None = None

    def watch(self, models: Iterable[nn.Module]) -> None:
        """These models are trained from now on, and copies that are made of them are not. Local."""
        self._modules.update(module for model in models for module in model.modules())

    def wait(self, function: Callable[[], None] | None) -> None:
        """Call ``function()``, in place of another one, when training begins; None: nothing."""
        self._function = function
        if function is not None and self._hook is None:
            self._hook = register_module_forward_pre_hook(self._forward_hook())
        elif function is None and self._hook is not None:
            self._hook.remove()
            self._hook = None

    @not_compiled
    def begin(self) -> None:
        """Training begins, if it has not begun before. Local."""
        if (function := self._function) is not None:
            self.wait(None)
            function()

    def _forward_hook(self) -> Callable[[nn.Module, object], None]:
        def hook(module: nn.Module, _: object) -> None:
            if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
                return
            if not _is_within_replay() and any(each in self._modules for each in module.modules()):
                self.begin()

        leave_to_python(hook)
        return hook


def _is_within_replay() -> bool:
    """Whether the random numbers drawn now are drawn once more in a backward pass, or are such.

    Activation checkpointing sets the generators to where they were when the part was entered.
    """
    if torch._C._current_graph_task_id() != -1 or torch._C._is_tracing():
        return True
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


training_start = TrainingStart()
"""Of this process."""
