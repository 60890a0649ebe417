"""A late gradient, corrected for how far the parameters have moved since it was computed.

    g~ = g + lambda g g (w - w_then)        element by element; w_then: where g was computed

is the gradient at w to first order, with lambda g g in place of the Hessian: the expectation of the
squared gradient of one sample is the diagonal of the Fisher matrix. The squared mean over a batch
of B samples is about B times smaller where noise is most of it, so that lambda of the size of the
global batch estimates the Fisher matrix, and 1 is a small correction.

Source: Zheng et al., *Asynchronous Stochastic Gradient Descent with Delay Compensation*, 2017
(DC-ASGD-c, with a constant lambda). Difference: g is the mean over ranks, not one worker's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from torchmn.exchange.buckets import NamedParameter


class DelayCompensation:
    """Keeps where gradients are computed, and corrects ``p.grad``. All methods are local.

    Args:
        factor: lambda; where gradients are sums over ranks, divided by the number of ranks.
        trained: returns the parameters that are exchanged, by name.
    """

    def __init__(self, factor: float, trained: Callable[[], Sequence[NamedParameter]]) -> None:
        self._factor, self._trained = factor, trained
        self._then: dict[str, Tensor] = {}
        """By name, the parameters for which the pending gradient was computed."""

    @torch.no_grad()
    def correct_gradients(self) -> None:
        """Correct every ``p.grad`` that was computed at the noted parameters."""
        for name, parameter in self._trained():
            gradient, then = parameter.grad, self._then.get(name)
            if gradient is None or then is None or then.shape != parameter.shape:
                continue
            # |g|^2 for complex numbers, so that the diagonal stays real.
            square = (gradient * gradient.conj()).real if gradient.is_complex() else gradient**2
            gradient.add_((parameter - then).mul_(square), alpha=self._factor)

    @torch.no_grad()
    def note_parameters(self) -> None:
        """The next gradient to be corrected was computed here."""
        before, self._then = self._then, {}
        for name, parameter in self._trained():
            kept = before.get(name)
            if kept is None or kept.shape != parameter.shape or kept.dtype != parameter.dtype:
                kept = torch.empty_like(parameter, requires_grad=False)
            self._then[name] = kept.copy_(parameter)

    def state_dict(self) -> dict[str, Tensor]:
        """The noted parameters, by name."""
        return {name: then.clone() for name, then in self._then.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`; an empty dict notes nothing."""
        named = self._trained() if state else []
        self._then = {name: state[name].to(p, copy=True) for name, p in named if name in state}
