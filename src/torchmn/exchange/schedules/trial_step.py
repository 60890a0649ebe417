"""Trial steps: they change parameters, and leave the optimizer itself as it was before."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchmn.base.torch_private import STEP_HOOKS

_CONTAINERS = (list, tuple, set, deque, dict)
_PARAMETERS = "params"


@contextmanager
def trial_step(optimizer: Optimizer) -> Iterator[None]:
    """Context in which steps change only parameters: no state, group option or count. Local.

    Hooks of the optimizer are not called, as they may keep counts and averages of their own.
    """
    state = optimizer.state
    known = list(state)
    mappings = [*optimizer.param_groups, *(v for v in state.values() if isinstance(v, dict))]
    kept = [
        {key: (value, _copied(value)) for key, value in mapping.items() if key != _PARAMETERS}
        for mapping in mappings
    ]
    # An optimizer may also count its steps in attributes, beside its state.
    numbers = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float))}
    hooks = {name: getattr(optimizer, name) for name in STEP_HOOKS}
    vars(optimizer).update({name: OrderedDict() for name in STEP_HOOKS})
    try:
        yield
    finally:
        vars(optimizer).update(hooks | numbers)
        # A first step makes its state: if that stayed, the real first step would not begin it.
        for new in state.keys() - known:
            del state[new]
        for mapping, before in zip(mappings, kept, strict=True):
            for new in mapping.keys() - before.keys() - {_PARAMETERS}:
                del mapping[new]
            for key, (value, copied) in before.items():
                mapping[key] = _restored(value, copied)


@torch.no_grad()
def _restored(value: object, copied: object) -> object:
    """The old value; a tensor is restored in place, as compiled steps refer to its address."""
    if isinstance(value, Tensor) and isinstance(copied, Tensor):
        return value.copy_(copied)
    return copied


def _copied(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, _CONTAINERS) else value
