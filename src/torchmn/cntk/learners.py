"""CNTK's learners as `torch.optim.Optimizer`.

With g the mean gradient of a minibatch of N samples, G = N g their sum, w a parameter, r the
learning rate for G (see `torchmn.cntk.schedules`), m and v the momenta of this minibatch, u = 1 - m
with ``unit_gain`` and 1 without; c is the threshold per sample; elementwise but for norms:

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

Means f are over the elements of a parameter, and are left out without ``need_ave_multiplier``. With
``use_mean_gradient`` N is 1 in all of this and G is g. These are CNTK's formulas, its learning rate
within s included.

A learner reads ``p.grad`` as the mean over the samples: what autograd leaves for a loss that is a
mean, and a multi-node optimizer with ``weight="samples"`` on all ranks.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.cntk.schedules import (
    Schedule,
    Values,
    learning_parameter_schedule,
    momentum_schedule,
    momentum_schedule_per_sample,
)
from torchmn.cntk.schedules import UnitType as UnitType  # CNTK's scripts import them from here
from torchmn.cntk.schedules import learning_rate_schedule as learning_rate_schedule
from torchmn.cntk.schedules import (
    momentum_as_time_constant_schedule as momentum_as_time_constant_schedule,
)
from torchmn.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

Parameters = (
    Iterable[nn.Parameter] | Iterable[dict[str, Any]] | Callable[[], Iterable[nn.Parameter]]
)
"""As `torch.optim` takes them; or the method ``model.parameters``, as CNTK's property."""
_PROGRESS = ("num_samples_seen", "num_sweeps", "num_minibatches")
"""What a group keeps beside its options: it comes from the checkpoint, the options do not."""


class LearnerOptions(TypedDict, total=False):
    """The options of every learner, by CNTK's names.

    The weights and thresholds may differ between groups: give parameters as dicts, as for any
    `torch.optim.Optimizer`.
    """

    l1_regularization_weight: float
    """Per sample; default 0."""
    l2_regularization_weight: float
    """Per sample; default 0."""
    gaussian_noise_injection_std_dev: Values | Schedule
    """The deviation of noise that is added to parameters after each update; default 0."""
    gradient_clipping_threshold_per_sample: float
    """Default: infinity."""
    gradient_clipping_with_truncation: bool
    """Clip each element, by default; else the norm of each parameter's gradient."""
    use_mean_gradient: bool
    """Let learning rates be for the mean gradient of a minibatch, whatever their unit."""
    minibatch_size: int | None
    """The size of the minibatches for which rates and momenta are given that are no schedules."""
    epoch_size: int | None
    """Of rates and momenta that are lists: the samples after which the next value holds."""


_GROUP_DEFAULTS: dict[str, Any] = {
    "l1_regularization_weight": 0.0,
    "l2_regularization_weight": 0.0,
    "gradient_clipping_threshold_per_sample": math.inf,
    "gradient_clipping_with_truncation": True,
}
_OTHER_DEFAULTS: dict[str, Any] = {
    "gaussian_noise_injection_std_dev": 0.0,
    "use_mean_gradient": False,
    "minibatch_size": None,
    "epoch_size": None,
}


@dataclass(frozen=True)
class Scale:
    """Of one minibatch: the rate r for the sum of gradients, and the N of which it is N means."""

    rate: float
    num_samples: float

    @property
    def of_mean(self) -> float:
        """The rate for the mean gradient."""
        return self.rate * self.num_samples


class Learner(Optimizer):
    """A `torch.optim.Optimizer` whose learning rate and momentum follow schedules.

    `Trainer` calls `begin_minibatch` before each `step` and `end_minibatch` after it; so must a
    loop of your own. ``group["lr"]`` shows the rate of the last minibatch; to set it, as schedulers
    of `torch.optim` do, is an error in the next step. `load_state_dict` keeps the schedules and
    options that the learner was made with.

    Raises UsageError: an option or a schedule is out of range, or no parameters.
    """

    def __init__(
        self, parameters: Parameters, lr: Values | Schedule, options: LearnerOptions
    ) -> None:
        given: dict[str, Any] = {**_GROUP_DEFAULTS, **_OTHER_DEFAULTS, **options}
        if unknown := [name for name in options if name not in _GROUP_DEFAULTS | _OTHER_DEFAULTS]:
            raise TypeError(f"Unknown option {unknown[0]!r} of {type(self).__name__.lower()}().")
        self._minibatch_size, self._epoch_size = given["minibatch_size"], given["epoch_size"]
        self._uses_mean = bool(given["use_mean_gradient"])
        self._noise = learning_parameter_schedule(given["gaussian_noise_injection_std_dev"])
        self._num_samples: float | None = None
        self.reset_learning_rate(lr)
        defaults = {name: given[name] for name in _GROUP_DEFAULTS}
        listed: list[Any] = list(parameters() if callable(parameters) else parameters)
        if not listed:
            raise UsageError(
                f"{type(self).__name__.lower()} got no parameters. Give those of a model that has "
                "some; a generator, such as model.parameters(), can be used once."
            )
        self._shown_lr = self.lr_schedule[0]
        super().__init__(listed, {"lr": self._shown_lr, **defaults, **dict.fromkeys(_PROGRESS, 0)})
        for group in self.param_groups:
            _check(group)
            self._raise_if_lr_was_set(group)

    # ---- what a learner defines ----

    @abstractmethod
    def update(self, weights: list[Tensor], gradients: list[Tensor], scale: Scale) -> None:
        """Change parameters in place by mean gradients, clipped and regularized."""

    # ---- schedules ----

    def reset_learning_rate(self, lr: Values | Schedule) -> None:
        """Replace the schedule of the learning rate. All ranks must call it."""
        self.lr_schedule = learning_parameter_schedule(lr, self._minibatch_size, self._epoch_size)
        if any(value < 0 or not math.isfinite(value) for _, value in self.lr_schedule.spans):
            raise UsageError(f"The learning rates {lr} must be finite and not negative.")

    def learning_rate(self) -> float:
        """The rate of the next minibatch, in the unit of its schedule."""
        return self.value(self.lr_schedule)

    def value(self, schedule: Schedule) -> float:
        """What a schedule holds for the next minibatch."""
        group = self.param_groups[0]
        return schedule.value(group["num_samples_seen"], group["num_sweeps"])

    def decay(self, schedule: Schedule) -> float:
        """The momentum of the next minibatch, for its number of samples."""
        return schedule.decay(self.value(schedule), self._num_samples or 0.0)

    def _momenta(self, momentum: Values | Schedule) -> Schedule:
        return momentum_schedule(momentum, self._epoch_size, self._minibatch_size)

    @property
    def total_number_of_samples_seen(self) -> int:
        """Samples over all workers in the minibatches so far."""
        return int(self.param_groups[0]["num_samples_seen"])

    # ---- minibatches ----

    def begin_minibatch(self, num_samples: float) -> None:
        """Set the number of samples of which ``p.grad`` is the mean in the next `step`. Local."""
        self._num_samples = num_samples

    def end_minibatch(self, num_samples: float, *, is_sweep_end: bool = False) -> None:
        """Advance the schedules by these samples over all workers. All ranks must call it."""
        self._num_samples = None
        for group in self.param_groups:
            group["num_samples_seen"] += num_samples
            group["num_sweeps"] += int(is_sweep_end)
            group["num_minibatches"] += 1

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient. Local.

        Raises:
            UsageError: `begin_minibatch` was not called, or ``group["lr"]`` was set.
            UnsupportedError: a gradient is sparse, and only `sgd` without options can use it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._num_samples is None:
            raise UsageError(
                f"{type(self).__name__} does not know the number of samples of this minibatch. "
                "Call begin_minibatch(number_of_samples) before step(), and end_minibatch() after "
                "it, as torchmn.cntk.Trainer does."
            )
        rate, num_samples = self.learning_rate(), self._num_samples
        for group in self.param_groups:
            self._raise_if_lr_was_set(group)
        for group in self.param_groups:
            group["lr"] = rate
        self._shown_lr = rate
        if num_samples == 0:
            return loss
        if self._uses_mean:
            scale = Scale(rate / (self.lr_schedule.minibatch_size or 1), 1.0)
        else:
            scale = Scale(self.lr_schedule.per_sample(rate, num_samples), num_samples)
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            gradients = [p.grad for p in weights]
            self._prepare(group, weights, gradients)
            self.update(weights, gradients, scale)
            if l1 := group["l1_regularization_weight"]:
                for weight in weights:
                    weight.copy_(nn.functional.softshrink(weight, scale.of_mean * l1))
        if deviation := self.value(self._noise):
            self._add_noise(deviation)
        return loss

    def _raise_if_lr_was_set(self, group: dict[str, Any]) -> None:
        if group["lr"] != self._shown_lr:
            raise UsageError(
                f"{type(self).__name__}: the learning rate of a group was set to {group['lr']!r}, "
                "which has no effect: all groups follow the schedule that the learner was made "
                "with. Instead of a scheduler of torch.optim give a learning_rate_schedule, or "
                "call reset_learning_rate(); for rates by group give the trainer several learners. "
                "Optimizers of torch.optim are learners as well, and keep their own rates."
            )

    def _prepare(
        self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Clip and regularize mean gradients, in place."""
        threshold, l2 = (
            group["gradient_clipping_threshold_per_sample"],
            group["l2_regularization_weight"],
        )
        is_plain = threshold == math.inf and not l2 and type(self) is SGD
        if not is_plain and any(gradient.is_sparse for gradient in gradients):
            raise UnsupportedError(
                f"{type(self).__name__}: a gradient is sparse, which only sgd without clipping and "
                "L2 can use. Make the embedding with sparse=False, or use torch.optim.SparseAdam "
                "as the learner of its parameters."
            )
        if threshold != math.inf:
            if group["gradient_clipping_with_truncation"]:
                torch._foreach_clamp_min_(gradients, -threshold)
                torch._foreach_clamp_max_(gradients, threshold)
            else:
                norms = torch._foreach_norm(gradients)
                factors = [(threshold / norm).clamp(max=1.0) for norm in norms]
                torch._foreach_mul_(gradients, factors)
        if l2:
            torch._foreach_add_(gradients, weights, alpha=l2)

    def _add_noise(self, deviation: float) -> None:
        """The same on all ranks, and after a resume: it depends on the count of minibatches."""
        seed = self.param_groups[0]["num_minibatches"]
        for group in self.param_groups:
            for index, weight in enumerate(group["params"]):
                generator = torch.Generator(device=weight.device).manual_seed(
                    seed * 1_000_003 + index
                )
                weight += deviation * torch.randn(
                    weight.shape, generator=generator, device=weight.device, dtype=weight.dtype
                )

    # ---- state ----

    def buffers(self, weights: list[Tensor], name: str, first: float = 0.0) -> list[Tensor]:
        """The state of this name of each parameter, filled with ``first`` where there is none."""
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.full_like(weight, first)
        return [self.state[weight][name] for weight in weights]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, with the schedules and options of this learner. Local."""
        before = self.param_groups
        super().load_state_dict(state_dict)
        self.adopt_progress(before, self.param_groups)

    def adopt_progress(self, own: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> None:
        """Continue with loaded groups, but with the options of the own ones. Local."""
        for group, before in zip(loaded, own, strict=True):
            kept = {k: v for k, v in before.items() if k != "params" and k not in _PROGRESS}
            group.update(kept)
        self.param_groups = loaded


class LearnerSet(Optimizer):
    """Several learners with different parameters, which step together. Local.

    One multi-node optimizer exchanges the gradients of all of them: with one for each, a rank
    without data would not know in which order the backward passes of the others end.
    """

    def __init__(self, learners: Sequence[Optimizer]) -> None:
        self.learners = list(learners)
        super().__init__([group for each in learners for group in each.param_groups], {})
        for each in learners:
            self.state.update(each.state)
        self._share(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step each learner."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.learners:
            each.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state; see `Learner.load_state_dict`. Local."""
        super().load_state_dict(state_dict)
        self._share(self.param_groups)

    def _share(self, groups: list[dict[str, Any]]) -> None:
        """Let each learner have its part of the groups, and the state of all."""
        for each in self.learners:
            count = len(each.param_groups)
            own, groups = groups[:count], groups[count:]
            each.state = self.state
            if isinstance(each, Learner):
                each.adopt_progress(each.param_groups, own)
            else:
                each.param_groups = own


class SGD(Learner):
    """See `sgd`."""

    def update(self, weights: list[Tensor], gradients: list[Tensor], scale: Scale) -> None:  # noqa: D102
        torch._foreach_add_(weights, gradients, alpha=-scale.of_mean)


class MomentumSGD(Learner):
    """See `momentum_sgd`; with ``is_nesterov`` see `nesterov`."""

    def __init__(
        self,
        parameters: Parameters,
        lr: Values | Schedule,
        momentum: Values | Schedule,
        options: LearnerOptions,
        *,
        unit_gain: bool,
        is_nesterov: bool = False,
    ) -> None:
        super().__init__(parameters, lr, options)
        self._momentum, self._unit_gain = self._momenta(momentum), unit_gain
        self._is_nesterov = is_nesterov

    def update(self, weights: list[Tensor], gradients: list[Tensor], scale: Scale) -> None:  # noqa: D102
        momentum = self.decay(self._momentum)
        gain = (1 - momentum if self._unit_gain else 1) * scale.of_mean
        smoothed = self.buffers(weights, "momentum_buffer")
        torch._foreach_mul_(smoothed, momentum)
        torch._foreach_add_(smoothed, gradients, alpha=gain)
        if self._is_nesterov:
            torch._foreach_add_(weights, smoothed, alpha=-momentum)
            torch._foreach_add_(weights, gradients, alpha=-gain)
        else:
            torch._foreach_sub_(weights, smoothed)


class Adam(Learner):
    """See `adam`."""

    def __init__(
        self,
        parameters: Parameters,
        lr: Values | Schedule,
        momentum: Values | Schedule,
        variance_momentum: Values | Schedule | None,
        options: LearnerOptions,
        *,
        unit_gain: bool,
        epsilon: float,
        adamax: bool,
    ) -> None:
        super().__init__(parameters, lr, options)
        self._momentum, self._unit_gain = self._momenta(momentum), unit_gain
        self._variance_momentum = (
            momentum_schedule_per_sample(_DEFAULT_VARIANCE_MOMENTUM)
            if variance_momentum is None
            else self._momenta(variance_momentum)
        )
        self._epsilon, self._is_adamax = epsilon, adamax

    def update(self, weights: list[Tensor], gradients: list[Tensor], scale: Scale) -> None:  # noqa: D102
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
        steps = self._count_minibatches(weights)
        rates = [
            -scale.rate
            * (1.0 if self._is_adamax else math.sqrt(1 - variance**step))
            / (1 - momentum**step)
            for step in steps
        ]
        torch._foreach_addcdiv_(weights, first, roots, rates)

    def _count_minibatches(self, weights: list[Tensor]) -> list[int]:
        """Count this minibatch for each of these; the counts with it."""
        for weight in weights:
            state = self.state[weight]
            state["step"] = state.get("step", 0) + 1
        return [self.state[weight]["step"] for weight in weights]


class AdaGrad(Learner):
    """See `adagrad`."""

    def __init__(
        self,
        parameters: Parameters,
        lr: Values | Schedule,
        options: LearnerOptions,
        *,
        need_ave_multiplier: bool,
    ) -> None:
        super().__init__(parameters, lr, options)
        self._divides_by_mean = need_ave_multiplier

    def update(self, weights: list[Tensor], gradients: list[Tensor], scale: Scale) -> None:  # noqa: D102
        sums = self.buffers(weights, "sum")
        torch._foreach_addcmul_(sums, gradients, gradients, scale.num_samples**2)
        factors = torch._foreach_add(sums, 1e-16)
        torch._foreach_sqrt_(factors)
        torch._foreach_reciprocal_(factors)
        _apply(weights, gradients, factors, scale, divides_by_mean=self._divides_by_mean)


class RMSProp(Learner):
    """See `rmsprop`."""

    def __init__(
        self,
        parameters: Parameters,
        lr: Values | Schedule,
        options: LearnerOptions,
        *,
        gamma: float,
        inc: float,
        dec: float,
        limits: tuple[float, float],
        need_ave_multiplier: bool,
    ) -> None:
        super().__init__(parameters, lr, options)
        self._gamma, self._inc, self._dec, self._limits = gamma, inc, dec, limits
        self._divides_by_mean = need_ave_multiplier

    def update(self, weights: list[Tensor], gradients: list[Tensor], scale: Scale) -> None:  # noqa: D102
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
        _apply(
            weights,
            gradients,
            torch._foreach_div(factors, roots),
            scale,
            divides_by_mean=self._divides_by_mean,
        )


_DEFAULT_VARIANCE_MOMENTUM = 0.9999986111120757
"""Per sample: exp(-1 / 720000), of CNTK."""


def _apply(
    weights: list[Tensor],
    gradients: list[Tensor],
    factors: Sequence[Tensor],
    scale: Scale,
    *,
    divides_by_mean: bool,
) -> None:
    """``w <- w - r f G / mean(f)``."""
    for weight, gradient, factor in zip(weights, gradients, factors, strict=True):
        if divides_by_mean:
            factor = factor / factor.mean()
        weight.addcmul_(gradient, factor, value=-scale.of_mean)


def _check(group: dict[str, Any]) -> None:
    for name in ("l1_regularization_weight", "l2_regularization_weight"):
        if not 0 <= group[name] < math.inf:
            raise UsageError(f"{name}={group[name]!r} must be finite and not negative.")
    threshold = group["gradient_clipping_threshold_per_sample"]
    if not threshold > 0:
        raise UsageError(
            f"gradient_clipping_threshold_per_sample={threshold!r} must be above 0; infinity, the "
            "default, clips nothing."
        )


def sgd(
    parameters: Parameters, lr: Values | Schedule, **options: Unpack[LearnerOptions]
) -> Learner:
    """Stochastic gradient descent.

    Args:
        parameters: as `torch.optim` takes them, or ``model.parameters`` itself.
        lr: a schedule; or a rate or list of rates, each for the mean of a minibatch, or for one of
            ``minibatch_size`` samples.
        options: see `LearnerOptions`.

    Raises UsageError: an option is out of range.
    """
    return SGD(parameters, lr, options)


def momentum_sgd(
    parameters: Parameters,
    lr: Values | Schedule,
    momentum: Values | Schedule,
    unit_gain: bool = True,
    **options: Unpack[LearnerOptions],
) -> Learner:
    """Stochastic gradient descent with momentum.

    Args:
        parameters, lr, options: see `sgd`.
        momentum: a schedule; or a momentum or list of these, per minibatch.
        unit_gain: whether gradients count 1 - momentum times, so that the momentum does not make
            steps longer.

    Raises UsageError: an option is out of range.
    """
    return MomentumSGD(parameters, lr, momentum, options, unit_gain=unit_gain)


def nesterov(
    parameters: Parameters,
    lr: Values | Schedule,
    momentum: Values | Schedule,
    unit_gain: bool = True,
    **options: Unpack[LearnerOptions],
) -> Learner:
    """`momentum_sgd` that looks ahead, as Nesterov's accelerated gradient. Arguments as there.

    Raises UsageError: an option is out of range.
    """
    return MomentumSGD(parameters, lr, momentum, options, unit_gain=unit_gain, is_nesterov=True)


def adam(
    parameters: Parameters,
    lr: Values | Schedule,
    momentum: Values | Schedule,
    unit_gain: bool = True,
    variance_momentum: Values | Schedule | None = None,
    epsilon: float = 1e-8,
    adamax: bool = False,
    **options: Unpack[LearnerOptions],
) -> Learner:
    """Adam. Its step does not grow with the number of samples, but its rate is divided by it.

    So a rate per minibatch of N samples makes steps of about rate / N, as in CNTK; with
    ``use_mean_gradient=True`` it makes steps of the rate, as in torch.

    Args:
        parameters, lr, momentum, unit_gain, options: see `momentum_sgd`.
        variance_momentum: of the squares; default: a time constant of 720,000 samples.
        epsilon: added to the root of the mean square of the sum of gradients.
        adamax: use the largest gradient instead of the mean square.

    Raises UsageError: an option is out of range.
    """
    return Adam(
        parameters,
        lr,
        momentum,
        variance_momentum,
        options,
        unit_gain=unit_gain,
        epsilon=epsilon,
        adamax=adamax,
    )


def adagrad(
    parameters: Parameters,
    lr: Values | Schedule,
    need_ave_multiplier: bool = True,
    **options: Unpack[LearnerOptions],
) -> Learner:
    """AdaGrad.

    Args:
        parameters, lr, options: see `sgd`.
        need_ave_multiplier: divide the factors of a parameter's elements by their mean.

    Raises UsageError: an option is out of range.
    """
    return AdaGrad(parameters, lr, options, need_ave_multiplier=need_ave_multiplier)


def rmsprop(
    parameters: Parameters,
    lr: Values | Schedule,
    gamma: float,
    inc: float,
    dec: float,
    max: float,
    min: float,
    need_ave_multiplier: bool = True,
    **options: Unpack[LearnerOptions],
) -> Learner:
    """CNTK's RMSProp, whose factors also grow while a gradient keeps its sign.

    Args:
        parameters, lr, options: see `sgd`.
        gamma: of the mean square.
        inc: by which a factor grows, up to ``max``.
        dec: by which it shrinks, down to ``min``.
        max: see ``inc``.
        min: see ``dec``.
        need_ave_multiplier: divide the factors of a parameter's elements by their mean.

    Raises UsageError: an option is out of range.
    """
    return RMSProp(
        parameters,
        lr,
        options,
        gamma=gamma,
        inc=inc,
        dec=dec,
        limits=(min, max),
        need_ave_multiplier=need_ave_multiplier,
    )
