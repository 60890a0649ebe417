"""The base class of CNTK's learners: schedules, options, clipping, regularization and state.

`torchmn.cntk.learners` has the update rules, and the formulas of all of this.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.errors import UnsupportedError, UsageError
from torchmn.cntk.schedules import Schedule, Values, learning_parameter_schedule, momentum_schedule

__all__ = ["Learner", "LearnerOptions"]

# As `torch.optim` takes them; or the method ``model.parameters``, as CNTK's property.
Parameters = (
    Iterable[nn.Parameter] | Iterable[dict[str, Any]] | Callable[[], Iterable[nn.Parameter]]
)
# Entries of a group that are loaded from a checkpoint; its options are not.
_PROGRESS = ("num_samples_seen", "num_sweeps", "num_minibatches")


class LearnerOptions(TypedDict, total=False):
    """The options of every learner, by CNTK's names.

    The weights and thresholds may differ between groups: give parameters as dicts, as for any
    `torch.optim.Optimizer`.

    >>> from torchmn import cntk
    >>> options: cntk.LearnerOptions = {"l2_regularization_weight": 1e-4}
    >>> learner = cntk.sgd(torch.nn.Linear(3, 1).parameters(), lr=0.1, **options)
    >>> learner.param_groups[0]["l2_regularization_weight"]
    0.0001
    """

    l1_regularization_weight: float
    """Weight of L1 regularization per sample; default 0."""
    l2_regularization_weight: float
    """Weight of L2 regularization per sample; default 0."""
    gaussian_noise_injection_std_dev: Values | Schedule
    """The deviation of noise that is added to parameters after each update; default 0."""
    gradient_clipping_threshold_per_sample: float
    """Threshold of clipping per sample; default: infinity."""
    gradient_clipping_with_truncation: bool
    """Clip each element (the default), or else the norm of each parameter's gradient."""
    use_mean_gradient: bool
    """Learning rates apply to the mean gradient of a minibatch, whatever their unit."""
    minibatch_size: int | None
    """The minibatch size for which rates and momenta are given, unless they are schedules."""
    epoch_size: int | None
    """Samples after which the next value of a list of rates or momenta applies."""


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
    """The rate for the sum of a minibatch's gradients, and the number of samples in the sum."""

    rate: float
    num_samples: float

    @property
    def of_mean(self) -> float:
        """The rate for the mean gradient."""
        return self.rate * self.num_samples


class Learner(Optimizer):
    """A `torch.optim.Optimizer` whose learning rate and momentum follow schedules.

    `Trainer` calls `begin_minibatch` before each `step` and `end_minibatch` after it; so must a
    loop of your own. ``group["lr"]`` shows the rate of the last minibatch; setting it, as
    schedulers of `torch.optim` do, makes the next step raise. `load_state_dict` keeps the schedules
    and options that the learner was made with.

    Raises UsageError: an option or a schedule is out of range, or there are no parameters.

    >>> from torchmn import cntk
    >>> learner = cntk.momentum_sgd(torch.nn.Linear(3, 1).parameters(), lr=0.1, momentum=0.9)
    >>> isinstance(learner, torch.optim.Optimizer), learner.learning_rate()
    (True, 0.1)
    """

    accepts_sparse_gradients = False
    """Whether `update` can use sparse gradients, if nothing is clipped or regularized."""
    number = 0
    """Number among the learners of a trainer, by which each has noise of its own."""

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
        """Update parameters in place from mean gradients, which are clipped and regularized."""

    # ---- schedules ----

    def reset_learning_rate(self, lr: Values | Schedule) -> None:
        """Replace the schedule of the learning rate. All ranks must call it.

        Raises UsageError: a rate is negative or not finite.
        """
        self.lr_schedule = learning_parameter_schedule(lr, self._minibatch_size, self._epoch_size)
        if any(value < 0 or not math.isfinite(value) for _, value in self.lr_schedule.spans):
            raise UsageError(f"The learning rates {lr} must be finite and not negative.")

    def learning_rate(self) -> float:
        """The rate of the next minibatch, in the unit of its schedule."""
        return self.value(self.lr_schedule)

    def value(self, schedule: Schedule) -> float:
        """The value of a schedule for the next minibatch."""
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
        is_plain = threshold == math.inf and not l2 and self.accepts_sparse_gradients
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
        """Add noise that depends on the count of minibatches only: the same on all ranks."""
        # Multiples of primes: generators of torch take 32 bits of a seed.
        seed = self.param_groups[0]["num_minibatches"] * 1_000_003 + self.number * 15_485_863
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for index, weight in enumerate(weights):
            generator = torch.Generator(device=weight.device).manual_seed(seed + index)
            weight += deviation * torch.randn(
                weight.shape, generator=generator, device=weight.device, dtype=weight.dtype
            )

    # ---- state ----

    def buffers(self, weights: list[Tensor], name: str, first: float = 0.0) -> list[Tensor]:
        """The named state of each parameter; new ones are filled with ``first``."""
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
        """Take over loaded groups, but keep the options of this learner. Local."""
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

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step each learner; the first one calls the closure, which computes all gradients."""
        first, *others = self.learners
        loss: float | None = first.step(closure)
        for each in others:
            each.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state; see `Learner.load_state_dict`. Local."""
        super().load_state_dict(state_dict)
        self._share(self.param_groups)

    def _share(self, groups: list[dict[str, Any]]) -> None:
        """Give each learner its part of the groups, and the state of all."""
        for each in self.learners:
            count = len(each.param_groups)
            own, groups = groups[:count], groups[count:]
            each.state = self.state
            if isinstance(each, Learner):
                each.adopt_progress(each.param_groups, own)
            else:
                each.param_groups = own


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
