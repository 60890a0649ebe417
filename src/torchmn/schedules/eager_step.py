"""A step with a rank's own gradient, until the mean of all ranks is there.

The expectation of a rank's own gradient is that of the mean, so that a step with it is right but
for noise. A schedule that waits for the mean takes it to compute the next gradient at about the
parameters that the mean will give, undoes it, and then steps with the mean: what ranks hold in the
long run depends on means only, and is the same on all of them.

The own gradient is made no longer than the last mean. It is noisier than the mean, and the mean
may have been clipped.

Source: the eager updates of Kale et al., *Eager Updates For Overlapped Communication and
Computation in DiLoCo*, 2025, which do the same with blocks and keep the own part of the mean.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.errors import UsageError

Named = Sequence[tuple[str, nn.Parameter]]


class EagerStep:
    """Takes and undoes steps with own gradients. All methods are local.

    ``trained`` returns the parameters that are exchanged, by name.
    """

    def __init__(self, inner: Optimizer, trained: Callable[[], Named], rank_label: str) -> None:
        self._inner, self._trained, self._rank_label = inner, trained, rank_label
        self._before: dict[str, Any] | None = None
        """The parameters and the optimizer's state before the step; None if there is none."""
        self._norms: Tensor | None = None
        """Of the parameters after it."""

    @property
    def is_taken(self) -> bool:
        """Whether the parameters are those of a step that will be undone."""
        return self._before is not None

    def take(self, own: Mapping[Tensor, Tensor], mean_norm: float) -> None:
        """Step with own gradients, scaled down to ``mean_norm`` where their norm is larger.

        Nothing is done where there are none, or not only finite ones. ``p.grad`` stays as it is.
        """
        own_norm = _norm(list(own.values()))
        if not (own_norm > 0 and math.isfinite(own_norm) and mean_norm > 0):
            return
        self._before = self._saved()
        factor = min(1.0, mean_norm / own_norm)
        parameters = [p for group in self._inner.param_groups for p in group["params"]]
        means = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = own[p] * factor if p in own else None
            self._inner.step()
        finally:
            for p, mean in zip(parameters, means, strict=True):
                p.grad = mean
        self._norms = self._norms_now()

    def undo(self) -> None:
        """Return to the parameters and the state before the step, if there was one.

        Raises UsageError: the script has changed the parameters since.
        """
        before = self._before
        if before is None:
            return
        if self._norms is not None and not torch.equal(self._norms, self._norms_now()):
            self._before = None
            raise UsageError(
                f"{self._rank_label}: parameters were changed after step(). Those were of a step "
                "with the rank's own gradient, which is undone when the mean is there, and the "
                "change would be lost. Call optimizer.flush() before it, or use "
                "DoubleBuffering(eager=False)."
            )
        self._load(before)
        self._before = None

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """What `undo` returns to, and this rank's parameters now."""
        if self._before is None:
            return {}
        return {"before": self._before, "after": _cloned(self._trained())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`: the parameters become those of the step."""
        self._before = None
        if not state:
            return
        self._load_parameters(state["after"])
        self._before = copy.deepcopy(state["before"])
        self._norms = self._norms_now()

    # ---- implementation ----

    def _saved(self) -> dict[str, Any]:
        state = self._inner.state
        return {
            "parameters": _cloned(self._trained()),
            "state": {
                name: {key: _copied(value) for key, value in state[p].items()}
                for name, p in self._trained()
                if p in state
            },
        }

    def _load(self, saved: dict[str, Any]) -> None:
        self._load_parameters(saved["parameters"])
        state = self._inner.state
        for name, p in self._trained():
            if name not in saved["state"]:
                state.pop(p, None)
                continue
            own = state[p]
            for key in own.keys() - saved["state"][name].keys():
                del own[key]
            for key, value in saved["state"][name].items():
                now = own.get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor):
                    now.copy_(value)  # the same tensor: compiled optimizers have its address
                else:
                    own[key] = value

    @torch.no_grad()
    def _load_parameters(self, saved: dict[str, Tensor]) -> None:
        for name, p in self._trained():
            p.copy_(saved[name])

    def _norms_now(self) -> Tensor:
        norms = torch._foreach_norm([p.detach() for _, p in self._trained()])
        return torch.stack([norm.double().cpu() for norm in norms])


def norm_of_gradients(inner: Optimizer) -> float:
    """The norm of all gradients that the optimizer would step with. Local."""
    grads = [p.grad for group in inner.param_groups for p in group["params"]]
    return _norm([grad for grad in grads if grad is not None])


def _norm(gradients: Sequence[Tensor]) -> float:
    dense = [
        gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients
    ]
    return float(torch.nn.utils.get_total_norm(dense)) if dense else 0.0


def _cloned(named: Named) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named}


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
