"""CNTK's learners as `torch.optim.Optimizer`.

With g the mean gradient of a minibatch of N samples, G = N g their sum, w a parameter, r the
learning rate for G (see `torchmn.cntk.schedules`), m and v the momenta of this minibatch, u = 1 - m
with ``unit_gain`` and 1 without, c the threshold per sample; elementwise, except norms:

    clip            G <- min(max(G, -c N), c N), or without truncation G <- G min(1, c N / ||G||)
    L2              G <- G + l2 N w
    sgd             w <- w - r G
    momentum_sgd    s <- m s + u r G;   w <- w - s
    nesterov        s <- m s + u r G;   w <- w - (m s + u r G)
    adam            a <- m a + u G;   b <- v b + (1 - v) G^2;   after t minibatches
                    w <- w - r a sqrt(1 - v^t) / (1 - m^t) / (sqrt(b) + eps)
                    (adamax: b <- max(v b, |G|), and 1 in place of sqrt(1 - v^t) and of the root)
    adagrad         b <- b + G^2;   f = 1 / sqrt(b + 1e-16);   w <- w - r f G / mean(f)
    rmsprop         b <- gamma b + (1 - gamma) G^2 (at first G^2);   p <- min(p inc, max) where the
                    sign of G is as before, else max(p dec, min), from 0.02;
                    f = p / sqrt(b + 1e-6);   w <- w - r f G / mean(f)
    L1              w <- sign(w) max(0, |w| - r l1 N)
    noise           w <- w + a normal number times the deviation, the same on all ranks

mean(f) is over the elements of a parameter, and is left out without ``need_ave_multiplier``. With
``use_mean_gradient`` N is 1 in all formulas and G is g. They are CNTK's formulas, including the
learning rate within s.

A learner reads ``p.grad`` as the mean over the samples: what autograd leaves for a loss that is a
mean, and a multi-node optimizer with ``weight="samples"`` on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchmn.cntk.learner import Learner, LearnerOptions, Parameters, Scale
from torchmn.cntk.schedules import (
    Schedule,
    UnitType,
    Values,
    learning_parameter_schedule,
    learning_rate_schedule,
    momentum_as_time_constant_schedule,
    momentum_schedule,
    momentum_schedule_per_sample,
)

__all__ = [
    "UnitType",  # CNTK's scripts import it and the schedules from here
    "adagrad",
    "adam",
    "learning_parameter_schedule",
    "learning_rate_schedule",
    "momentum_as_time_constant_schedule",
    "momentum_schedule",
    "momentum_sgd",
    "nesterov",
    "rmsprop",
    "sgd",
]

if TYPE_CHECKING:
    from typing_extensions import Unpack

_DEFAULT_VARIANCE_MOMENTUM = 0.9999986111120757  # per sample: exp(-1 / 720000), of CNTK


class SGD(Learner):
    """Stochastic gradient descent.

    Args:
        parameters: as `torch.optim` takes them, or ``model.parameters`` itself.
        lr: a schedule; or a rate or list of rates, each for the mean of a minibatch, or for one of
            ``minibatch_size`` samples.
        options: see `LearnerOptions`.

    Raises UsageError: an option is out of range.

    Example:
        >>> layer = torch.nn.Linear(3, 2)
        >>> learner = sgd(layer.parameters(), learning_rate_schedule(0.1, UnitType.minibatch))
    """

    accepts_sparse_gradients = True

    def __init__(
        self, parameters: Parameters, lr: Values | Schedule, **options: Unpack[LearnerOptions]
    ) -> None:
        super().__init__(parameters, lr, options)

    def update(self, weights: list[Tensor], gradients: list[Tensor], scale: Scale) -> None:
        torch._foreach_add_(weights, gradients, alpha=-scale.of_mean)


class MomentumSGD(Learner):
    """Stochastic gradient descent with momentum.

    Args:
        parameters, lr, options: see `sgd`.
        momentum: a schedule; or a momentum or list of these, per minibatch.
        unit_gain: multiply gradients by 1 - momentum, so that the momentum does not make steps
            longer.

    Raises UsageError: an option is out of range.

    Example:
        >>> layer, rate = torch.nn.Linear(3, 2), learning_rate_schedule(0.1, UnitType.minibatch)
        >>> learner = momentum_sgd(layer.parameters(), rate, momentum_schedule(0.9))
    """

    looks_ahead = False

    def __init__(
        self,
        parameters: Parameters,
        lr: Values | Schedule,
        momentum: Values | Schedule,
        unit_gain: bool = True,
        **options: Unpack[LearnerOptions],
    ) -> None:
        super().__init__(parameters, lr, options)
        self._momentum, self._unit_gain = self._momenta(momentum), unit_gain

    def update(self, weights: list[Tensor], gradients: list[Tensor], scale: Scale) -> None:
        momentum = self.decay(self._momentum)
        gain = (1 - momentum if self._unit_gain else 1) * scale.of_mean
        smoothed = self.buffers(weights, "momentum_buffer")
        torch._foreach_mul_(smoothed, momentum)
        torch._foreach_add_(smoothed, gradients, alpha=gain)
        if self.looks_ahead:
            torch._foreach_add_(weights, smoothed, alpha=-momentum)
            torch._foreach_add_(weights, gradients, alpha=-gain)
        else:
            torch._foreach_sub_(weights, smoothed)


class Nesterov(MomentumSGD):
    """`momentum_sgd` with Nesterov's accelerated gradient. It takes the same arguments.

    Raises UsageError: an option is out of range.

    Example:
        >>> layer, rate = torch.nn.Linear(3, 2), learning_rate_schedule(0.1, UnitType.minibatch)
        >>> learner = nesterov(layer.parameters(), rate, momentum_schedule(0.9))
    """

    looks_ahead = True


class Adam(Learner):
    """CNTK's Adam: steps do not grow with the number of samples, but the rate is divided by it.

    So a rate per minibatch of N samples makes steps of about rate / N, as in CNTK; with
    ``use_mean_gradient=True`` it makes steps of the rate, as in torch.

    Args:
        parameters, lr, momentum, unit_gain, options: see `momentum_sgd`.
        variance_momentum: the momentum of the squares; default: a time constant of 720,000 samples.
        epsilon: added to the root of the mean square of the sum of gradients.
        adamax: use the largest gradient instead of the mean square.

    Raises UsageError: an option is out of range.

    Example:
        >>> layer, rate = torch.nn.Linear(3, 2), learning_rate_schedule(0.001, UnitType.sample)
        >>> learner = adam(layer.parameters(), rate, momentum_schedule(0.9))
    """

    def __init__(
        self,
        parameters: Parameters,
        lr: Values | Schedule,
        momentum: Values | Schedule,
        unit_gain: bool = True,
        variance_momentum: Values | Schedule | None = None,
        epsilon: float = 1e-8,
        adamax: bool = False,
        **options: Unpack[LearnerOptions],
    ) -> None:
        super().__init__(parameters, lr, options)
        self._momentum, self._unit_gain = self._momenta(momentum), unit_gain
        self._variance_momentum = (
            momentum_schedule_per_sample(_DEFAULT_VARIANCE_MOMENTUM)
            if variance_momentum is None
            else self._momenta(variance_momentum)
        )
        self._epsilon, self._is_adamax = epsilon, adamax

    def update(self, weights: list[Tensor], gradients: list[Tensor], scale: Scale) -> None:
        momentum, variance = self.decay(self._momentum), self.decay(self._variance_momentum)
        gain = 1 - momentum if self._unit_gain else 1
        first = self.buffers(weights, "exp_avg")
        second = self.buffers(weights, "exp_avg_sq")
        torch._foreach_mul_(first, momentum)
        torch._foreach_add_(first, gradients, alpha=gain * scale.num_samples)
        torch._foreach_mul_(second, variance)
        if self._is_adamax:
            sizes = torch._foreach_abs(gradients)
            torch._foreach_mul_(sizes, scale.num_samples)
            torch._foreach_maximum_(second, sizes)
            roots = torch._foreach_add(second, self._epsilon)
        else:
            share = (1 - variance) * scale.num_samples**2
            torch._foreach_addcmul_(second, gradients, gradients, share)
            roots = torch._foreach_sqrt(second)
            torch._foreach_add_(roots, self._epsilon)
        rates = []
        for weight in weights:
            step = self.state[weight]["step"] = self.state[weight].get("step", 0) + 1
            root = 1.0 if self._is_adamax else math.sqrt(1 - variance**step)
            rates.append(-scale.rate * root / (1 - momentum**step))
        torch._foreach_addcdiv_(weights, first, roots, rates)


class AdaGrad(Learner):
    """CNTK's AdaGrad, which can divide a parameter's factors by their mean.

    Args:
        parameters, lr, options: see `sgd`.
        need_ave_multiplier: divide the factors of a parameter's elements by their mean.

    Raises UsageError: an option is out of range.

    Example:
        >>> layer, rate = torch.nn.Linear(3, 2), learning_rate_schedule(0.01, UnitType.sample)
        >>> learner = adagrad(layer.parameters(), rate)
    """

    def __init__(
        self,
        parameters: Parameters,
        lr: Values | Schedule,
        need_ave_multiplier: bool = True,
        **options: Unpack[LearnerOptions],
    ) -> None:
        super().__init__(parameters, lr, options)
        self._divides_by_mean = need_ave_multiplier

    def update(self, weights: list[Tensor], gradients: list[Tensor], scale: Scale) -> None:
        sums = self.buffers(weights, "sum")
        torch._foreach_addcmul_(sums, gradients, gradients, scale.num_samples**2)
        factors = torch._foreach_add(sums, 1e-16)
        torch._foreach_sqrt_(factors)
        torch._foreach_reciprocal_(factors)
        if self._divides_by_mean:
            factors = _over_means(factors)
        torch._foreach_addcmul_(weights, gradients, factors, -scale.of_mean)


class RMSProp(Learner):
    """CNTK's RMSProp, whose factors also grow while a gradient keeps its sign.

    Args:
        parameters, lr, options: see `sgd`.
        gamma: the decay of the mean square.
        inc: what a factor is multiplied by while the gradient keeps its sign.
        dec: what a factor is multiplied by otherwise.
        max: the largest factor.
        min: the smallest factor.
        need_ave_multiplier: divide the factors of a parameter's elements by their mean.

    Raises UsageError: an option is out of range.

    >>> from torchmn import cntk
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> learner = cntk.rmsprop([weight], 0.1, gamma=0.9, inc=1.2, dec=0.5, max=10, min=0.1)
    >>> weight.grad = torch.ones(1)
    >>> learner.begin_minibatch(1)
    >>> learner.step()
    >>> learner.end_minibatch(1)
    >>> weight.item() < 1
    True
    """

    def __init__(
        self,
        parameters: Parameters,
        lr: Values | Schedule,
        gamma: float,
        inc: float,
        dec: float,
        max: float,
        min: float,
        need_ave_multiplier: bool = True,
        **options: Unpack[LearnerOptions],
    ) -> None:
        super().__init__(parameters, lr, options)
        self._gamma, self._inc, self._dec, self._limits = gamma, inc, dec, (min, max)
        self._divides_by_mean = need_ave_multiplier

    def update(self, weights: list[Tensor], gradients: list[Tensor], scale: Scale) -> None:
        squares = torch._foreach_mul(gradients, gradients)
        torch._foreach_mul_(squares, scale.num_samples**2)
        for weight, square in zip(weights, squares, strict=True):
            if not self.state[weight]:
                self.state[weight]["square_avg"] = square.clone()
        averages = self.buffers(weights, "square_avg")
        torch._foreach_mul_(averages, self._gamma)
        torch._foreach_add_(averages, squares, alpha=1 - self._gamma)
        signs = self.buffers(weights, "sign")
        factors = self.buffers(weights, "step_size", 0.02)
        low, high = self._limits
        for gradient, sign, factor in zip(gradients, signs, factors, strict=True):
            new_sign = gradient.sign()
            grows = sign * new_sign > 0
            longer, shorter = factor * self._inc, factor * self._dec
            factor.copy_(torch.where(grows, longer.clamp(max=high), shorter.clamp(min=low)))
            sign.copy_(new_sign)
        roots = torch._foreach_add(averages, 1e-6)
        torch._foreach_sqrt_(roots)
        rates = torch._foreach_div(factors, roots)
        if self._divides_by_mean:
            rates = _over_means(rates)
        torch._foreach_addcmul_(weights, gradients, rates, -scale.of_mean)


def _over_means(factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``f / mean(f)``, the mean over the elements of a parameter."""
    return tuple(factor / factor.mean() for factor in factors)


sgd, momentum_sgd, nesterov = SGD, MomentumSGD, Nesterov
adam, adagrad, rmsprop = Adam, AdaGrad, RMSProp
