"""Learning rates as functions of the samples seen, in epochs or samples.

    rate of a group = its first rate x factor of each schedule

The samples are those of `GlobalBatch`, so a rate does not depend on the number of ranks, on the
accumulation, on how often ``step()`` is called or on how the batch has grown, and a resumed run has
the rates of one that never stopped, to the bit. Schedules are combined by wrapping: the first
argument is the optimizer or another schedule of this module; the outermost one is stepped.

    schedule = LinearScaling(optimizer, batch, base_batch=256)
    schedule = GradualWarmup(schedule, batch, 5)
    schedule = MultiStep(schedule, batch, [30, 60, 80])

is the recipe of Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, 2017,
arXiv 1706.02677, sections 2.1, 2.2 and 5.1.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, get_args

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchmn.base.errors import ResultWarning, UsageError, raise_if_unknown
from torchmn.base.warn import warn
from torchmn.data.batch_settings import BatchSettings
from torchmn.train.large_batch.batch_growth import Unit, check_milestones
from torchmn.train.large_batch.global_batch import GlobalBatch


class BatchSchedule(LRScheduler):
    """Base class of the schedules here. Subclasses implement `factor`. Local.

    Call ``step()`` of the outermost schedule after ``optimizer.step()``, at each step or at each
    epoch. Save optimizer and schedule, as with any scheduler of torch, and the samples seen, which
    are part of the sampler's state (or of `GlobalBatch.state_dict`).

    Rates that are set elsewhere, by hand or by another scheduler that is stepped beside this one or
    in a `torch.optim.lr_scheduler.ChainedScheduler`, are overwritten by the next ``step()``, which
    warns once. In a `torch.optim.lr_scheduler.SequentialLR`, where schedules follow one another,
    they work together.

    Args:
        optimizer: an optimizer, multi-node or not, or the schedule that this one multiplies.
        batch: counts the samples seen, and knows those of an epoch.

    Raises UsageError: an argument is out of range.

    Example:
        >>> class Halving(torchmn.train.large_batch.BatchSchedule):
        ...     def factor(self, samples):
        ...         return 0.5 ** (samples // 1000)
        >>> batch = torchmn.train.large_batch.GlobalBatch(64, comm=comm)
        >>> sgd = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)
        >>> schedule = Halving(sgd, batch)
        >>> [schedule.factor(samples) for samples in (0, 1000, 2000)]
        [1.0, 0.5, 0.25]
    """

    def __init__(self, optimizer: Optimizer | BatchSchedule, batch: GlobalBatch) -> None:
        self.batch = batch
        self._inner: BatchSchedule | None = None
        self._outer: BatchSchedule | None = None
        if isinstance(optimizer, BatchSchedule):
            self._inner = optimizer
            optimizer._outer = self
            optimizer = optimizer.optimizer
        self._has_warned = False
        super().__init__(optimizer)

    def factor(self, samples: int) -> float:
        """The factor of the rate after ``samples`` samples over all ranks."""
        raise NotImplementedError

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next step.

        Raises UsageError: the batch has neither a sampler nor a count, so rates would never change;
        or another schedule wraps this one.
        """
        if self._step_count > 0:  # not the first step, which the constructor makes
            if not self.batch.is_counting:
                raise UsageError(
                    f"{type(self).__name__}.step(): the GlobalBatch counts no samples, so the rate "
                    "would never change. Make the sampler by batch.sampler(dataset), or call "
                    "batch.count() after each step."
                )
            if epoch is None and self._outer is None:  # with an epoch SequentialLR begins with it
                self._warn_if_changed()
        super().step()

    def _warn_if_changed(self) -> None:
        """Warn once if a rate is not the one that was set last, which is then lost.

        An optimizer that has loaded a state has other groups, whose rates are those of the state.
        """
        groups = self.optimizer.param_groups
        if self._has_warned or groups is not self._groups_set:
            return
        for index, (group, last) in enumerate(zip(groups, self._last_lr, strict=False)):
            now = group["lr"]
            if isinstance(now, Tensor) and now.is_cuda:  # reading it would make the host wait
                continue
            if now == last:
                continue
            self._has_warned = True
            name = type(self).__name__
            warn(
                f"{self.batch.comm.rank_label}: {name} has set the rate of parameter group {index} "
                f"to {float(last):g}, and now it is {float(now):g}. {name} computes rates from the "
                "samples seen, so what others set, by hand or by a scheduler beside it (StepLR, "
                "ReduceLROnPlateau, ChainedScheduler), is overwritten. For one after the other use "
                "torch's SequentialLR; to multiply factors, a schedule of "
                "torchmn.train.large_batch such as MultiStep around this one.",
                ResultWarning,
            )
            return

    def get_lr(self) -> list[float | Tensor]:
        """The current rates, by group."""
        if self._outer is not None:
            name, outer = type(self).__name__, type(self._outer).__name__
            raise UsageError(
                f"{name} is wrapped by {outer}, which multiplies both factors. Step the outermost "
                f"schedule, and not {name}."
            )
        self._groups_set = self.optimizer.param_groups
        factor = self._product(self.batch.samples_seen)
        return [rate * factor for rate in self.base_lrs]

    def _product(self, samples: int) -> float:
        """The factors of this schedule and of those that it wraps."""
        inner = 1.0 if self._inner is None else self._inner._product(samples)
        return inner * self.factor(samples)

    def batch_settings(self) -> BatchSettings | None:
        """The global batch that a checkpoint records; see `torchmn.data.batch_settings`."""
        return self.batch.batch_settings()

    def state_dict(self) -> dict[str, Any]:
        """The initial and the current rates by group."""
        return {"base_lrs": list(self.base_lrs), "rates": list(self.get_last_lr())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. The rates of the next step are in the optimizer's."""
        self.base_lrs, self._last_lr = list(state["base_lrs"]), list(state["rates"])


class LinearScaling(BatchSchedule):
    """Scales the rate linearly with the batch: by ``batch / base_batch``.

    Goyal et al. 2017, section 2.1, and Krizhevsky, arXiv 1404.5997, section 5. The batch is that of
    the beginning: `BatchGrowth` takes the place of a decay and leaves the rate alone.

    Args:
        optimizer: its rate is the one that was found with ``base_batch``; or a schedule.
        batch: the global batch that is used now.
        base_batch: the global batch for which the rate was found.

    Example:
        >>> batch = torchmn.train.large_batch.GlobalBatch(1024, comm=comm)
        >>> sgd = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)
        >>> LinearScaling(sgd, batch, base_batch=256).get_last_lr()
        [0.4]
    """

    def __init__(
        self, optimizer: Optimizer | BatchSchedule, batch: GlobalBatch, *, base_batch: int
    ) -> None:
        if not 1 <= base_batch < float("inf"):
            raise UsageError(f"base_batch={base_batch} must be a finite number, at least 1.")
        self.base_batch = base_batch
        super().__init__(optimizer, batch)

    def factor(self, samples: int) -> float:
        """The factor, which does not depend on ``samples``."""
        return self.batch.initial / self.base_batch


class SquareRootScaling(LinearScaling):
    """Scales the rate with the square root of the batch, for adaptive optimizers (LAMB, Adam).

    Krizhevsky, arXiv 1404.5997, section 5; You et al., arXiv 1904.00962, section 4. It keeps the
    variance of the update; see `LinearScaling` for the arguments.

    Example:
        >>> batch = torchmn.train.large_batch.GlobalBatch(1024, comm=comm)
        >>> adam = torch.optim.Adam(torch.nn.Linear(3, 1).parameters(), lr=0.1)
        >>> SquareRootScaling(adam, batch, base_batch=256).get_last_lr()
        [0.2]
    """

    def factor(self, samples: int) -> float:
        """The factor, which does not depend on ``samples``."""
        return math.sqrt(super().factor(samples))


class GradualWarmup(BatchSchedule):
    """Increases the rate linearly over the first ``duration``.

    Goyal et al. 2017, section 2.2: after each step, from the rate before `LinearScaling` to the
    scaled one.

    Args:
        optimizer: an optimizer, or a schedule.
        batch: counts the samples seen.
        duration: the length of the warm-up, in ``unit``.
        unit: ``epochs`` or ``samples``.
        start: the first factor. By default it undoes the scaling that this schedule wraps; without
            scaling it is 0.1.

    Example:
        >>> batch = torchmn.train.large_batch.GlobalBatch(1024, comm=comm)
        >>> sgd = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)
        >>> scaled = LinearScaling(sgd, batch, base_batch=256)
        >>> warmup = GradualWarmup(scaled, batch, 4096, unit="samples")
        >>> [warmup.factor(samples) for samples in (0, 2048, 4096)]  # of the scaled rate
        [0.25, 0.625, 1.0]
    """

    def __init__(
        self,
        optimizer: Optimizer | BatchSchedule,
        batch: GlobalBatch,
        duration: float,
        *,
        unit: Unit = "epochs",
        start: float | None = None,
    ) -> None:
        self._duration = _in_samples(batch, duration, unit)
        if start is None:
            scaling = 1.0
            inner = optimizer if isinstance(optimizer, BatchSchedule) else None
            while inner is not None:
                scaling *= inner.factor(0) if isinstance(inner, LinearScaling) else 1.0
                inner = inner._inner
            start = 0.1 if scaling == 1 else min(1.0, 1 / scaling)
        elif not 0 <= start <= 1:
            raise UsageError(f"start={start} must be between 0 and 1.")
        self.start = start
        super().__init__(optimizer, batch)

    def factor(self, samples: int) -> float:
        """The factor, which grows from ``start`` to 1."""
        if samples >= self._duration:
            return 1.0
        return self.start + (1 - self.start) * samples / self._duration


class MultiStep(BatchSchedule):
    """Multiplies the rate by ``gamma`` at each milestone.

    Args:
        optimizer: an optimizer, or a schedule.
        batch: counts the samples seen.
        milestones: increasing, in ``unit``.
        gamma: the factor, more than 0.
        unit: ``epochs`` or ``samples``.

    Example:
        >>> batch = torchmn.train.large_batch.GlobalBatch(64, comm=comm)
        >>> sgd = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)
        >>> schedule = MultiStep(sgd, batch, [1000, 2000], gamma=0.5, unit="samples")
        >>> [schedule.factor(samples) for samples in (0, 1000, 2000)]
        [1.0, 0.5, 0.25]
    """

    def __init__(
        self,
        optimizer: Optimizer | BatchSchedule,
        batch: GlobalBatch,
        milestones: Sequence[float],
        gamma: float = 0.1,
        *,
        unit: Unit = "epochs",
    ) -> None:
        check_milestones(milestones, unit)
        _raise_if_not_positive("gamma", gamma)
        self._milestones = [batch.samples_in(each, unit) for each in milestones]
        self.gamma = gamma
        super().__init__(optimizer, batch)

    def factor(self, samples: int) -> float:
        """``gamma`` to the power of the milestones that were passed."""
        return float(self.gamma ** bisect_right(self._milestones, samples))


class Polynomial(BatchSchedule):
    """Decays the rate to ``final`` as a power of the remaining time.

    ``power=2`` is what You et al. use with LARS (arXiv 1708.03888, section 6).

    Args:
        optimizer: an optimizer, or a schedule.
        batch: counts the samples seen.
        end: when the last factor is reached, in ``unit``.
        power: 1 is a straight line; more than 0.
        unit: ``epochs`` or ``samples``.
        begin: until when the factor is 1, in ``unit``: the end of a warm-up.
        final: the last factor.

    Example:
        >>> batch = torchmn.train.large_batch.GlobalBatch(64, comm=comm)
        >>> sgd = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)
        >>> schedule = Polynomial(sgd, batch, 1000, unit="samples")
        >>> [schedule.factor(samples) for samples in (0, 500, 1000)]
        [1.0, 0.25, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer | BatchSchedule,
        batch: GlobalBatch,
        end: float,
        power: float = 2.0,
        *,
        unit: Unit = "epochs",
        begin: float = 0.0,
        final: float = 0.0,
    ) -> None:
        if not 0 <= begin < end:
            raise UsageError(f"begin={begin} must be 0 or more and before end={end}.")
        _raise_if_not_positive("power", power)
        if not 0 <= final <= 1:
            raise UsageError(f"final={final} must be between 0 and 1, a part of the first rate.")
        self._begin, self._end = _in_samples(batch, begin, unit), _in_samples(batch, end, unit)
        self.power, self.final = power, final
        super().__init__(optimizer, batch)

    def factor(self, samples: int) -> float:
        """The factor, which falls from 1 to ``final``."""
        past = (samples - self._begin) / (self._end - self._begin)
        return self.final + (1 - self.final) * self._left(min(1.0, max(0.0, past)))

    def _left(self, past: float) -> float:
        """The remaining fraction of the decay after a fraction ``past`` of the time."""
        return float((1 - past) ** self.power)


class Cosine(Polynomial):
    """Decays the rate to ``final`` as half a period of a cosine.

    Loshchilov and Hutter, *SGDR*, arXiv 1608.03983, equation 5, without restarts.

    Args:
        optimizer: an optimizer, or a schedule.
        batch: counts the samples seen.
        end: when the last factor is reached, in ``unit``.
        unit: ``epochs`` or ``samples``.
        begin: until when the factor is 1, in ``unit``: the end of a warm-up.
        final: the last factor.

    Example:
        >>> batch = torchmn.train.large_batch.GlobalBatch(64, comm=comm)
        >>> sgd = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)
        >>> schedule = Cosine(sgd, batch, 1000, unit="samples")
        >>> [round(schedule.factor(samples), 3) for samples in (0, 500, 1000)]
        [1.0, 0.5, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer | BatchSchedule,
        batch: GlobalBatch,
        end: float,
        *,
        unit: Unit = "epochs",
        begin: float = 0.0,
        final: float = 0.0,
    ) -> None:
        super().__init__(optimizer, batch, end, unit=unit, begin=begin, final=final)

    def _left(self, past: float) -> float:
        return (1 + math.cos(math.pi * past)) / 2


class DecayAfterGrowth(BatchSchedule):
    """Divides the rate by the factor by which the batch would have grown beyond its largest size.

    Smith et al., arXiv 1711.00489, section 5.1: with ``BatchGrowth(..., max_batch=...)`` the noise
    is annealed as planned even when the batch no longer grows.

    Raises UsageError: the batch has no `BatchGrowth`.

    Example:
        >>> from torchmn.train.large_batch import BatchGrowth, GlobalBatch
        >>> growth = BatchGrowth([1000, 2000], 2, unit="samples", max_batch=128)
        >>> batch = GlobalBatch(64, comm=comm, growth=growth)
        >>> sgd = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)
        >>> schedule = DecayAfterGrowth(sgd, batch)
        >>> [schedule.factor(samples) for samples in (0, 1000, 2000)]
        [1.0, 1.0, 0.5]
    """

    def __init__(self, optimizer: Optimizer | BatchSchedule, batch: GlobalBatch) -> None:
        if batch.growth is None:
            raise UsageError(
                "DecayAfterGrowth needs a GlobalBatch with growth=BatchGrowth(...); without growth "
                "use MultiStep."
            )
        super().__init__(optimizer, batch)

    def factor(self, samples: int) -> float:
        """The size of the batch divided by its size without ``max_batch``."""
        growth, batch = self.batch.growth, self.batch
        if growth is None or growth.max_batch is None:
            return 1.0
        wanted = growth.wanted_at(batch.initial, samples, batch.epoch_samples)
        return min(1.0, max(batch.initial, growth.max_batch) / wanted)


def _raise_if_not_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise UsageError(f"{name}={value} must be a finite number greater than 0.")


def _in_samples(batch: GlobalBatch, duration: float, unit: Unit) -> float:
    """Convert a duration to samples. Raises UsageError: it is negative, or cannot be converted."""
    raise_if_unknown("unit", unit, get_args(Unit))
    if not 0 <= duration < float("inf"):
        raise UsageError(f"{duration} {unit} must be a finite number, 0 or more.")
    return batch.samples_in(duration, unit)
