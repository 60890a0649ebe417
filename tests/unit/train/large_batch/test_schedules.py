"""Learning rates are functions of the samples seen."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ExponentialLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader, TensorDataset

from tests.unit.data.test_global_sampler import Placement
from torchmn.errors import ResultWarning, UnknownNameError, UsageError
from torchmn.train.large_batch import (
    BatchGrowth,
    BatchSchedule,
    Cosine,
    DecayAfterGrowth,
    GlobalBatch,
    GradualWarmup,
    LinearScaling,
    MultiStep,
    Polynomial,
    SquareRootScaling,
)

NUM_SAMPLES = 50


def sgd(rate: float | torch.Tensor = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], rate)


def batch_of(global_batch: int = 10, **options: object) -> GlobalBatch:
    return GlobalBatch(global_batch, comm=Placement(0, 1), **options)


def sampled(global_batch: int = 10, **options: object) -> GlobalBatch:
    """With a sampler, by which epochs are counted."""
    batch = batch_of(global_batch, **options)
    batch.sampler(NUM_SAMPLES)
    return batch


def rates(schedule: BatchSchedule, num_epochs: int) -> list[float]:
    """Of each step of a loop over the sampler."""
    loader = DataLoader(
        TensorDataset(torch.arange(NUM_SAMPLES)), batch_sampler=schedule.batch._sampler
    )
    found = []
    for _ in range(num_epochs):
        for _ in loader:
            found.append(schedule.optimizer.param_groups[0]["lr"])
            schedule.optimizer.step()
            schedule.step()
    return found


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (lambda o, b: LinearScaling(o, b, base_batch=5), lambda s: 2.0),
        (lambda o, b: SquareRootScaling(o, b, base_batch=5), lambda s: math.sqrt(2)),
        (lambda o, b: GradualWarmup(o, b, 2, start=0.2), lambda s: min(1, 0.2 + 0.8 * s / 100)),
        (lambda o, b: GradualWarmup(o, b, 30, unit="samples"), lambda s: min(1, 0.1 + 0.03 * s)),
        (lambda o, b: MultiStep(o, b, [1, 2.5], 0.5), lambda s: 0.5 ** ((s >= 50) + (s >= 125))),
        (lambda o, b: Polynomial(o, b, 3), lambda s: max(0, 1 - s / 150) ** 2),
        (
            lambda o, b: Polynomial(o, b, 3, 1.0, begin=1, final=0.1),
            lambda s: 0.1 + 0.9 * (1 - min(1, max(0, s - 50) / 100)),
        ),
        (
            lambda o, b: Cosine(o, b, 3, final=0.2),
            lambda s: 0.2 + 0.4 * (1 + math.cos(math.pi * min(1, s / 150))),
        ),
    ],
)  # fmt: skip
def test_formula(
    make: Callable[[torch.optim.Optimizer, GlobalBatch], BatchSchedule],
    factor: Callable[[int], float],
) -> None:
    batch = sampled()
    schedule = make(sgd(), batch)
    assert isinstance(schedule, LRScheduler)
    assert rates(schedule, 4) == pytest.approx([0.1 * factor(10 * k) for k in range(20)])
    assert schedule.get_last_lr() == pytest.approx([0.1 * factor(200)])


def test_factors_are_multiplied_and_the_outermost_schedule_is_stepped() -> None:
    batch = sampled(40)
    scaling = LinearScaling(sgd(), batch, base_batch=10)
    warmup = GradualWarmup(scaling, batch, 1)
    schedule = MultiStep(warmup, batch, [2])
    # From the rate of the base batch to four times it; then a tenth. Epochs are 40 and 10 samples.
    expected = [0.1, 0.1 * (1 + 3 * 0.8), 0.4, 0.4, 0.04, 0.04]
    assert rates(schedule, 3) == pytest.approx(expected)
    with pytest.raises(UsageError, match="GradualWarmup is wrapped by MultiStep"):
        warmup.step()


def test_two_schedules_side_by_side_are_warned_of() -> None:
    batch = sampled()
    optimizer = sgd()
    first, second = MultiStep(optimizer, batch, [0.1]), Cosine(optimizer, batch, 3)
    for _ in batch._sampler:
        optimizer.step()
        first.step()
        with pytest.warns(ResultWarning, match="Cosine has set .* to 0\\.1, and now it is 0\\.01"):
            second.step()
        break


def test_without_a_sampler_samples_are_counted() -> None:
    batch = batch_of(10)
    schedule = MultiStep(sgd(), batch, [25], unit="samples")
    with pytest.raises(UsageError, match=r"batch\.count\(\)"):
        schedule.step()
    found = []
    for num in (None, None, 4, None):
        schedule.optimizer.step()
        batch.count(num)
        schedule.step()
        found.append(schedule.get_last_lr()[0])
    assert found == pytest.approx([0.1, 0.1, 0.1, 0.01])
    with pytest.raises(UsageError, match="epochs are an unknown number of samples"):
        Cosine(schedule, batch, 3)
    other = batch_of(10)
    other.load_state_dict(batch.state_dict())
    assert other.samples_seen == 34


def test_decay_after_growth_keeps_batch_over_rate_as_planned() -> None:
    batch = sampled(10, growth=BatchGrowth([1, 2, 3], 4, max_batch=50))
    schedule = DecayAfterGrowth(sgd(0.1), batch)
    found = rates(schedule, 4)
    # Batches of 10, 40 and 50; the planned ones are 10, 40, 160 and 640.
    assert found == pytest.approx([0.1] * 5 + [0.1] * 2 + [0.1 * 50 / 160] + [0.1 * 50 / 640])
    with pytest.raises(UsageError, match="use MultiStep"):
        DecayAfterGrowth(sgd(), batch_of())


def test_warmup_without_scaling_and_with_a_smaller_batch() -> None:
    batch = sampled(10)
    assert GradualWarmup(sgd(), batch, 1).get_last_lr() == pytest.approx([0.01])
    smaller = LinearScaling(sgd(), batch, base_batch=40)
    assert GradualWarmup(smaller, batch, 1).get_last_lr() == pytest.approx([0.025])  # no warm-up


def test_wrong_arguments_are_refused() -> None:
    batch = sampled()
    with pytest.raises(UsageError, match="increasing"):
        MultiStep(sgd(), batch, [2, 1])
    with pytest.raises(UnknownNameError, match="steps"):
        Cosine(sgd(), batch, 3, unit="steps")
    with pytest.raises(UsageError, match="before end=3"):
        Polynomial(sgd(), batch, 3, begin=4)
    with pytest.raises(UsageError, match="start=2"):
        GradualWarmup(sgd(), batch, 1, start=2)
    with pytest.raises(UsageError, match="base_batch=0"):
        LinearScaling(sgd(), batch, base_batch=0)
    with pytest.raises(UsageError, match="finite"):
        GradualWarmup(sgd(), batch, float("inf"))
    nan = float("nan")
    with pytest.raises(UsageError, match="^power="):
        Polynomial(sgd(), batch, 3, power=nan)
    with pytest.raises(UsageError, match="^gamma="):
        MultiStep(sgd(), batch, [1], gamma=0)
    with pytest.raises(UsageError, match="^final="):
        Cosine(sgd(), batch, 3, final=1.1)


# ---- rates that others set ----


def stepped(schedule: BatchSchedule | LRScheduler, batch: GlobalBatch, num_epochs: int) -> None:
    for _ in range(num_epochs):
        for _ in batch._sampler:
            schedule.optimizer.step()
            schedule.step()


def test_a_rate_set_by_others_is_warned_of_with_the_group() -> None:
    batch = sampled()
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.1, 0.3)]
    optimizer = torch.optim.SGD(groups, 1.0)
    scaling = LinearScaling(optimizer, batch, base_batch=5)
    schedule = MultiStep(scaling, batch, [9])
    stepped(schedule, batch, 1)
    plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, min_lr=[0.2, 0.0])
    for loss in (1.0, 2.0):
        plateau.step(loss)
    with pytest.warns(ResultWarning, match=r"MultiStep has set .* group 1 to 0\.6, .* it is 0\.3"):
        schedule.step()
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.6)
    optimizer.param_groups[0]["lr"] = 7.0  # by hand; one warning is enough
    schedule.step()


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # of SequentialLR in torch 2.6
def test_one_schedule_after_the_other_is_not_warned_of() -> None:
    """Warnings are errors in tests."""
    optimizer, batch = sgd(), sampled()
    warmup = GradualWarmup(optimizer, batch, 1)
    stepped(SequentialLR(optimizer, [warmup, ExponentialLR(optimizer, 0.5)], [5]), batch, 2)
    optimizer, batch = sgd(), sampled()
    first = LinearLR(optimizer, 0.1, 1, 5)
    stepped(
        SequentialLR(optimizer, [first, Polynomial(optimizer, batch, 3, begin=1)], [5]), batch, 3
    )
    optimizer, batch = sgd(), sampled()
    inner, first = GradualWarmup(optimizer, batch, 1), LinearLR(optimizer, 0.1, 1, 5)
    outer = MultiStep(inner, batch, [1], 0.5)
    stepped(SequentialLR(optimizer, [first, outer], [5]), batch, 1)
    assert optimizer.param_groups[0]["lr"] == outer.get_last_lr()[0] == pytest.approx(0.05)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize(
    "names",
    [
        ("sampler", "optimizer"),  # the rates follow from the samples, so this is enough
        ("optimizer", "sampler", "schedule"),
        ("schedule", "sampler", "optimizer"),
    ],
)
def test_a_resumed_schedule_is_not_warned_of(
    names: tuple[str, ...], rate: float | torch.Tensor
) -> None:
    def parts() -> dict[str, object]:
        optimizer, batch = sgd(copy.deepcopy(rate)), sampled()
        scaling = LinearScaling(optimizer, batch, base_batch=5)
        return {
            "sampler": batch._sampler,
            "optimizer": optimizer,
            "schedule": Cosine(scaling, batch, 3),
        }

    saved = parts()
    stepped(saved["schedule"], saved["schedule"].batch, 1)
    resumed = parts()
    for name in names:
        resumed[name].load_state_dict(copy.deepcopy(saved[name].state_dict()))
    for each in (saved, resumed):
        each["schedule"].base_lrs = [0.2]  # the way to change the first rate
        stepped(each["schedule"], each["schedule"].batch, 1)
    found = [float(each["optimizer"].param_groups[0]["lr"]) for each in (saved, resumed)]
    assert found[0] == found[1] == pytest.approx(0.2 * 2 * 0.25)
