"""One run: simulated workers on one core, with the classes that a script on a cluster would use.

K workers with b samples each are simulated by steps of K b samples in one process. Two things make
them workers. The gradient is the mean over all samples, as the exchange makes it. And each part of
b samples has its own mean and variance in batch normalization, which is `GhostBatchNorm2d` of size
b; `tests/project/test_large_batch_table.py` compares a simulated run with two real workers.

The running statistics of batch normalization depend on how many steps there were and on the order
of the workers. So all sides estimate them again after the last step, over the same images, and the
table compares what was learned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from accuracy.tasks import Images, crop_and_flip
from accuracy.worker import evaluate
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from large_batch.runs import NUM_POINTS
from large_batch.sides import GHOST, Side
from large_batch.tasks import BASE_BATCH, DECAY, MOMENTUM, Task

MAX_PASS = 128
"""Samples of a forward and backward pass: no more than stay in the processor's cache."""
NUM_NORM_IMAGES = 2048
NUM_LOSS_IMAGES = 2500
NOISE_STEPS = 5
"""The gradient noise scale is measured in every fifth step."""


class Recipe:
    """Batch, sampler, optimizer and schedule of a side. *Collective.*"""

    def __init__(self, task: Task, side: Side, model: nn.Module, comm: Any, seed: int) -> None:
        import torchmn
        from torchmn.large_batch import (
            LARS,
            BatchGrowth,
            GlobalBatch,
            convert_to_ghost_batch_norm,
            weight_decay_groups,
        )

        largest, is_whole = side.factor * BASE_BATCH, side.recipe == "one batch norm"
        growth = None
        if side.recipe == "growth":
            growth = BatchGrowth(task.milestones, factor=DECAY, max_batch=largest)
        self.batch = GlobalBatch(
            BASE_BATCH if growth else largest,
            local_batch=largest if is_whole else max(BASE_BATCH, min(largest, MAX_PASS)),
            comm=comm,
            growth=growth,
        )
        self.sampler = self.batch.sampler(task.num_images, seed=seed)
        if not is_whole:
            is_base = side.recipe != "ghosts of 32"
            convert_to_ghost_batch_norm(model, BASE_BATCH if is_base else GHOST)
        groups = weight_decay_groups(model, task.source.weight_decay)
        rate = side.learning_rate or task.learning_rate
        inner: torch.optim.Optimizer
        if side.recipe == "LARS":
            trust = task.trust[side.factor] if side.trust is None else side.trust
            inner = LARS(groups, rate, MOMENTUM, task.source.weight_decay, trust)
        else:
            inner = torch.optim.SGD(groups, rate, momentum=MOMENTUM, nesterov=True)
        self.optimizer = torchmn.create_multi_node_optimizer(inner, comm, model)
        self.schedule = self._schedule(task, side)

    def _schedule(self, task: Task, side: Side) -> Any:
        from torchmn.large_batch import DecayAfterGrowth, GradualWarmup, LinearScaling, MultiStep

        if self.batch.growth is not None:
            return DecayAfterGrowth(self.optimizer, self.batch)
        schedule: Any = self.optimizer
        if side.is_scaled:
            schedule = LinearScaling(schedule, self.batch, base_batch=BASE_BATCH)
        if side.has_warm_up:
            warm_up = task.warm_up_epochs if side.warm_up_epochs is None else side.warm_up_epochs
            schedule = GradualWarmup(schedule, self.batch, warm_up)
        return MultiStep(schedule, self.batch, task.milestones, gamma=1 / DECAY)

    def step(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
        """One update; the mean loss and the share of right answers before it. *Collective.*"""
        loss, hits = 0.0, 0.0
        self.optimizer.zero_grad()
        for (inputs, labels), share in self.batch.micro_batches((x, y), self.optimizer):
            logits = model(inputs)
            own = cross_entropy(logits, labels) * share
            own.backward()
            loss += own.item()
            hits += (logits.detach().argmax(1) == labels).float().mean().item() * share
        if math.isfinite(loss):
            self.optimizer.step()
            self.schedule.step()
        return loss, hits


def train(task: Task, side: Side, seed: int, images: Images) -> dict[str, Any]:
    """One run, with the outcome that `LargeRun` has. *Collective.*

    On more than one rank the gradient noise scale is measured, and curves are those of this rank.
    """
    import torchmn

    comm = torchmn.create_communicator("naive")
    torch.manual_seed(seed)
    model = task.network().to(memory_format=torch.channels_last)
    recipe = Recipe(task, side, model, comm, seed)
    noise = None
    if comm.size > 1:
        noise = torchmn.large_batch.GradientNoiseScale(recipe.optimizer, every=NOISE_STEPS)
    curve, why, num_steps = Curve(task), "", 0
    for x, y in batches(task, images, seed, recipe.sampler, comm.rank):
        loss, hits = recipe.step(model, x, y)
        num_steps += 1
        if not math.isfinite(loss):
            why = f"the loss was {loss} in step {num_steps}"
            break
        curve.add(len(y) * comm.size, loss, hits, noise and noise.value())
    recipe.optimizer.close()
    guess = 100 / len(images.test[1].unique())
    accuracy, loss = guess, math.inf
    if not why:
        estimate_norms(model, images.train[0][:NUM_NORM_IMAGES])
        accuracy, _ = evaluate(model, images.test, comm)
        _, loss = evaluate(model, tuple(part[:NUM_LOSS_IMAGES] for part in images.train), comm)
    if not math.isfinite(loss):
        accuracy, loss = guess, 1e9  # JSON has no infinity
    return {
        "status": "done",
        "why": why,
        "accuracy": accuracy,
        "loss": loss,
        "num_steps": num_steps,
        "curve": curve.mean(0),
        "hits": [round(100 * share, 3) for share in curve.mean(1)],
        "noise": curve.mean(2) if noise else [],
    }


def batches(
    task: Task, images: Images, seed: int, sampler: Any, rank: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's samples of each step. All sides have the same samples in the same order."""
    inputs, labels = images.train
    generator = torch.Generator().manual_seed(1_000_000 * (rank + 1) + seed)
    for _ in range(task.epochs):
        for chosen in sampler:
            x = inputs[chosen]
            if task.source.augmentation == "crop and flip":
                x = crop_and_flip(x, generator)
            yield x, labels[chosen]


class Curve:
    """Mean loss, accuracy and noise scale of samples, in `NUM_POINTS` equal parts of the run."""

    def __init__(self, task: Task) -> None:
        self._per_point = task.num_samples / NUM_POINTS
        self._seen = 0
        self._points: list[list[tuple[int, float, float, float]]] = [[] for _ in range(NUM_POINTS)]

    def add(self, num: int, loss: float, hits: float, noise: float | None) -> None:
        """A step counts where its middle is."""
        point = min(NUM_POINTS - 1, int((self._seen + num / 2) / self._per_point))
        is_known = noise is not None and math.isfinite(noise)
        self._points[point].append((num, loss, hits, noise if is_known else 0.0))
        self._seen += num

    def mean(self, column: int) -> list[float]:
        """By point, to the last that has a step; one without a step is like the one before it."""
        values: list[float] = []
        for steps in self._points[: math.ceil(self._seen / self._per_point)]:
            total = sum(step[0] for step in steps)
            if steps:
                mean = sum(step[0] * step[column + 1] for step in steps) / total
                values += [round(mean, 5)] * (1 if values else self._first_point() + 1)
            elif values:
                values.append(values[-1])
        return values

    def _first_point(self) -> int:
        return next(index for index, steps in enumerate(self._points) if steps)


@torch.no_grad()
def estimate_norms(model: nn.Module, inputs: Tensor) -> None:
    """Set the running statistics of batch normalization to the means over these images."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the plain mean
    for part in inputs.split(MAX_PASS):
        model(part)
