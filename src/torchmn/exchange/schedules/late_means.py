"""Corrections of gradients that are applied a step late: none, or delay compensation.

A late gradient g is corrected for how far the parameters have moved since it was computed:

    g~ = g + lambda g g (w - w_then)        element by element; w_then: where g was computed

is the gradient at w to first order, with lambda g g in place of the Hessian: the expectation of
the squared gradient of one sample is the diagonal of the Fisher matrix. The squared mean over a
batch of B samples is about B times smaller where noise is most of it, so that lambda of the size
of the global batch estimates the Fisher matrix, and 1 is a small correction.

Source: Zheng et al., *Asynchronous Stochastic Gradient Descent with Delay Compensation*, 2017
(DC-ASGD-c, with a constant lambda). Difference: g is the mean over ranks, not one worker's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchmn.exchange.buckets import NamedParameter


class LateMeans:
    """Applies late means without a correction. All methods are local."""

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner

    def mean_assigned(self) -> None:
        """Called when every ``p.grad`` holds its late mean."""

    def pass_ended(self) -> None:
        """Called when a backward pass has ended, whose mean will be applied a step late."""

    def step(self, own: Mapping[Tensor, Tensor], scale: float) -> None:
        """Apply the means.

        ``own`` and ``scale`` are used by `EagerStep`: this rank's gradients of the following pass,
        and their size relative to a mean.
        """
        self._inner.step()

    def remove(self) -> None:
        """Restore the parameters that all ranks hold, before they are read."""

    def forget(self) -> None:
        """Discard a step with this rank's own gradients of the last pass."""

    def close(self) -> None:
        """Stop watching."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that belongs to the pending mean."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; an empty dict starts from scratch."""


class DelayCompensation(LateMeans):
    """Keeps the parameters at which gradients are computed, and corrects ``p.grad``.

    Args:
        inner: the optimizer.
        factor: lambda, divided by the number of ranks if gradients are sums over ranks.
        trained: returns the exchanged parameters with their names.
    """

    def __init__(
        self, inner: Optimizer, factor: float, trained: Callable[[], Sequence[NamedParameter]]
    ) -> None:
        super().__init__(inner)
        self._factor, self._trained = factor, trained
        self._then: dict[str, Tensor] = {}
        """The parameters at which the pending gradient was computed, by name."""

    @torch.no_grad()
    def mean_assigned(self) -> None:
        """Correct every ``p.grad``, which was computed at the parameters kept by `pass_ended`."""
        for name, parameter in self._trained():
            gradient, then = parameter.grad, self._then.get(name)
            if gradient is not None and then is not None and then.shape == parameter.shape:
                compensate_(gradient, parameter - then, self._factor)

    @torch.no_grad()
    def pass_ended(self) -> None:
        """Keep the parameters: the next gradient to be corrected was computed at them."""
        before, self._then = self._then, {}
        for name, parameter in self._trained():
            kept = before.get(name)
            if kept is None or kept.shape != parameter.shape or kept.dtype != parameter.dtype:
                kept = torch.empty_like(parameter, requires_grad=False)
            self._then[name] = kept.copy_(parameter)

    def state_dict(self) -> dict[str, Any]:
        """The kept parameters, by name."""
        return {"then": {name: then.clone() for name, then in self._then.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LateMeans.load_state_dict`."""
        then = state.get("then", {})
        named = self._trained() if then else []
        self._then = {name: then[name].to(p, copy=True) for name, p in named if name in then}


def compensate_(gradient: Tensor, drift: Tensor, factor: float) -> None:
    """Add ``factor * g * g * drift`` to a gradient g, in place. ``drift`` is overwritten."""
    # |g|^2 for complex numbers, so that the diagonal stays real.
    square = (gradient * gradient.conj()).real if gradient.is_complex() else gradient * gradient
    gradient.add_(drift.mul_(square), alpha=factor)
