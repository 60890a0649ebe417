"""The tasks: data, network and settings, tuned for synchronous float32."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from accuracy.networks import DigitNet, ResidualNet
from accuracy.sides import BASELINE, BATCH, SIDES

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from datasets import load_images
from models.vgg import VGG

Augmentation = Literal["none", "crop and flip"]
NUM_WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class Task:
    """``batch`` is of one worker. The learning rate rises over the first steps, then falls to 0
    along half a cosine. ``sides`` are trained; ``goal`` is in percent, see `bars.steps_to_goal`.
    ``fresh_seeds`` are for sides whose rate was chosen: they were not used before. The last
    ``held_out`` training images are not trained on and are used as test images.
    """

    name: str
    data: str
    network: Callable[[], nn.Module]
    seeds: tuple[int, ...]
    epochs: int
    batch: int
    learning_rate: float
    weight_decay: float
    augmentation: Augmentation = "none"
    sides: tuple[str, ...] = tuple(SIDES)
    classes: tuple[int, ...] | None = None
    max_steps: int | None = None
    num_loss_images: int = 5000
    curve_steps: int = 25
    goal: float | None = None
    momentum: float = 0.9
    warm_up_share: float = 0.1
    fresh_seeds: tuple[int, ...] = ()
    held_out: int = 0

    def seeds_of(self, side: str) -> tuple[int, ...]:
        """The seeds with which a side is evaluated; the baseline has all of them."""
        if not self.fresh_seeds:
            return self.seeds
        if side == BASELINE:
            return (*self.seeds, *self.fresh_seeds)
        return self.fresh_seeds if SIDES[side].rate_of else self.seeds

    def num_steps(self, num_images: int) -> int:
        """Steps of a run; an incomplete global batch at the end of an epoch is dropped."""
        steps = self.epochs * (num_images // (self.batch * NUM_WORKERS))
        return min(steps, self.max_steps or steps)

    def rate(self, step: int, num_steps: int) -> float:
        """The factor of the learning rate at a step."""
        rise = max(1, round(self.warm_up_share * num_steps))
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, num_steps - rise)))


TASKS = {
    task.name: task
    for task in (
        Task(
            name="mnist",
            data="mnist",
            network=DigitNet,
            seeds=(0, 1, 2),
            fresh_seeds=(10, 11, 12),
            epochs=3,
            batch=64,
            learning_rate=0.03,
            weight_decay=1e-4,
        ),
        Task(
            name="cifar",
            data="cifar10",
            network=ResidualNet,
            seeds=(0, 1, 2, 3, 4),
            fresh_seeds=(10, 11, 12, 13, 14),
            epochs=12,
            batch=BATCH,
            learning_rate=0.05,
            weight_decay=5e-4,
            augmentation="crop and flip",
            sides=tuple(SIDES),
        ),
        Task(  # the network whose steps `bench_exchange.py` times, on aeroplanes and frogs
            name="vgg",
            data="cifar10",
            network=VGG,
            seeds=(0, 1, 2),
            epochs=2,
            batch=BATCH,
            learning_rate=0.02,
            weight_decay=5e-4,
            augmentation="crop and flip",
            sides=(
                BASELINE,
                *("every step 1bit", "every step int8"),
                *("block momentum int8, overlapped", "DiLoCo int8, overlapped"),
            ),
            classes=(0, 6),
            max_steps=48,
            num_loss_images=0,
            curve_steps=1,
            goal=80.0,
        ),
    )
}


@dataclass(frozen=True)
class Images:
    """A data set in memory, normalised: images and labels."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load(task: Task, folder: str) -> Images:
    """Load the data of a task."""
    found = load_images(task.data, folder).normalised()
    train, test = found.train.tensors, found.test.tensors
    if task.held_out:
        test = tuple(part[-task.held_out :] for part in train)
        train = tuple(part[: -task.held_out] for part in train)
    return Images(_chosen(task, *train), _chosen(task, *test))


def _chosen(task: Task, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if task.classes is None:
        return images, labels
    is_meant = torch.isin(labels, torch.tensor(task.classes))
    return images[is_meant], labels[is_meant]


def batches(task: Task, images: Images, seed: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This worker's part of every step. All sides see the same samples in the same order."""
    inputs, labels = images.train
    num_global = task.batch * NUM_WORKERS
    steps_left = task.num_steps(len(labels))
    for epoch in range(task.epochs):
        order = torch.randperm(
            len(labels), generator=torch.Generator().manual_seed(1_000 * seed + epoch)
        )
        own = torch.Generator().manual_seed(1_000_000 * (rank + 1) + 1_000 * seed + epoch)
        for step in range(min(steps_left, len(labels) // num_global)):
            steps_left -= 1
            start = step * num_global + rank * task.batch
            chosen = order[start : start + task.batch]
            x = inputs[chosen]
            if task.augmentation == "crop and flip":
                x = crop_and_flip(x, own)
            yield x, labels[chosen]


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to 4 pixels, with zeros at the border, and mirrored or not."""
    number, _, height, width = images.shape
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    down, right = torch.randint(9, (2, number, 1), generator=generator)
    rows, columns = torch.arange(height) + down, torch.arange(width) + right
    is_mirrored = torch.rand(number, 1, generator=generator) < 0.5
    columns = torch.where(is_mirrored, columns.flip(1), columns)
    samples = torch.arange(number)[:, None, None]
    return padded[samples, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
