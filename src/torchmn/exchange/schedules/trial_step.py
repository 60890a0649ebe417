"""Steps of an optimizer that are tried out: afterwards it is as it was, but for the parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchmn.base.torch_private import STEP_HOOKS

_CONTAINERS = (list, tuple, set, deque, dict)
Restore = Callable[[], None]


@contextmanager
def trial_step(optimizer: Optimizer) -> Iterator[None]:
    """Steps inside change parameters alone: no state, no option of a group, no count. Local.

    They call no hooks of the optimizer: these may keep counts and averages of their own.
    """
    restores = [_kept_state(optimizer)]
    restores += [_kept(group, without="params") for group in optimizer.param_groups]
    numbers = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float))}
    hooks = {name: getattr(optimizer, name) for name in STEP_HOOKS}
    vars(optimizer).update({name: OrderedDict() for name in STEP_HOOKS})
    try:
        yield
    finally:
        vars(optimizer).update(hooks | numbers)
        for restore in restores:
            restore()


def _kept_state(optimizer: Optimizer) -> Restore:
    state = optimizer.state
    of_each = {key: _kept(value) for key, value in state.items() if isinstance(value, dict)}

    def restore() -> None:
        for key in [key for key in state if key not in of_each]:
            del state[key]
        for each in of_each.values():
            each()

    return restore


def _kept(mapping: MutableMapping[Any, Any], without: str = "") -> Restore:
    """What makes it the same again, and the same tensors: compiled steps have their addresses."""
    kept = {key: (value, _copied(value)) for key, value in mapping.items() if key != without}

    @torch.no_grad()
    def restore() -> None:
        for key in [key for key in mapping if key not in kept and key != without]:
            del mapping[key]
        for key, (value, copied) in kept.items():
            if isinstance(value, Tensor) and isinstance(copied, Tensor):
                value.copy_(copied)
                mapping[key] = value
            else:
                mapping[key] = copied

    return restore


def _copied(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, _CONTAINERS) else value
