"""One step of an optimizer, taken for some parameters at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from torchmn.profiling.observers import OptimizerStepHook

SEPARABLE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers that update each parameter from its own gradient, state and group's options alone."""


def is_separable(optimizer: Optimizer) -> bool:
    """Whether a step may be taken for some parameters at a time.

    Other classes declare it by an attribute ``is_separable = True``. Without it they are taken to
    use all gradients at once (LBFGS, estimates of a learning rate).
    """
    return type(optimizer) in SEPARABLE or bool(getattr(optimizer, "is_separable", False))


def sees_steps(optimizer: Optimizer, num_own_hooks: int) -> str | None:
    """What else is called with each step of the optimizer, and may look at gradients; or None."""
    if (
        len(optimizer._optimizer_step_pre_hooks) > num_own_hooks
        or optimizer._optimizer_step_post_hooks
        or _sees_gradients(torch_optimizer._global_optimizer_pre_hooks)
        or _sees_gradients(torch_optimizer._global_optimizer_post_hooks)
    ):
        return "a step hook is registered on the optimizer"
    own_step = vars(optimizer).get("step")
    if own_step is not None and not getattr(own_step, "_wrapped_by_lr_sched", False):
        return "the optimizer's step() was replaced"
    return None


def _sees_gradients(hooks: Mapping[int, object]) -> bool:
    """Whether any of these may look at gradients: those of the record of steps do not."""
    return any(not isinstance(hook, OptimizerStepHook) for hook in hooks.values())


class PartialStep:
    """A step with the options that the optimizer has now, for parameters as they come.

    The optimizer keeps state by parameter, so that it is exact for those that are separable. Hooks
    are not called.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._options = [
            {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in optimizer.param_groups
        ]
        self._group_of: dict[nn.Parameter, int] = {
            parameter: index
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        step = type(optimizer).step
        # torch wraps the step of a class so that it calls hooks.
        self._step: Any = cast(Any, step).__wrapped__ if getattr(step, "hooked", False) else step
        if "step" in vars(optimizer):
            # Replaced by a learning rate scheduler, which asks whether there was a step.
            vars(optimizer)["_opt_called"] = True

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._group_of

    def update(self, parameters: Collection[nn.Parameter]) -> None:
        """Step for these parameters, whatever modes the calling code runs in."""
        groups: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(self._group_of[parameter], []).append(parameter)
        optimizer = self._optimizer
        everything = optimizer.param_groups
        optimizer.param_groups = [
            {"params": members, **self._options[index]} for index, members in groups.items()
        ]
        device = next(iter(parameters)).device.type if parameters else "cpu"
        try:
            with torch.inference_mode(False), torch.autocast(device, enabled=False):
                self._step(optimizer)
        finally:
            optimizer.param_groups = everything
