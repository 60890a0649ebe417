"""The two tasks of the large-batch table: data, network, the base batch and its settings.

Every side of a task sees the same number of samples, ``epochs`` times ``num_images``. The rate is
divided by ``DECAY`` at each of the ``milestones``; a batch that grows is multiplied by it there.
What was chosen, by `choice.py` and on other seeds and images, is marked as such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from accuracy import tasks as accuracy
from accuracy.networks import DigitNet, ResidualNet
from accuracy.tasks import Images
from torch import nn

BASE_BATCH = 8
FACTORS = (4, 16, 64)
DECAY = 4
"""By what the rate is divided, or a growing batch multiplied, at each milestone."""
MOMENTUM = 0.9


@dataclass(frozen=True, kw_only=True)
class Task:
    """``learning_rate`` is that of the base batch; ``trust`` and ``warm_up_epochs`` by factor.

    ``data`` is the name of a task of `accuracy.tasks`, whose images, augmentation and weight decay
    are taken. Of its training images the first ``num_images`` are trained on, and the last
    ``held_out``, if there are any, are the test images in place of the real ones. ``seeds`` are
    those of factor 1 and 16, of which the other factors take the first ``num_seeds``.
    """

    name: str
    data: str
    network: Callable[[], nn.Module]
    num_images: int
    epochs: int
    milestones: tuple[float, ...]
    learning_rate: float
    warm_up_epochs: float
    trust: Mapping[int, float]
    seeds: tuple[int, ...]
    num_seeds: int
    held_out: int = 0

    @property
    def num_samples(self) -> int:
        """Of a run, the same for all sides."""
        return self.epochs * self.num_images

    @property
    def source(self) -> accuracy.Task:
        """The task of `make bench-accuracy` whose data are used."""
        return accuracy.TASKS[self.data]

    def seeds_of(self, factor: int) -> tuple[int, ...]:
        """The seeds with which sides of a batch are evaluated."""
        return self.seeds if factor in (1, 16) else self.seeds[: self.num_seeds]


TASKS = {
    task.name: task
    for task in (
        Task(
            name="mnist",
            data="mnist",
            network=DigitNet,
            num_images=15_000,
            epochs=3,
            milestones=(1.5, 2.25, 2.7),
            learning_rate=0.01,  # chosen
            warm_up_epochs=0.3,  # chosen
            trust={4: 0.1, 16: 0.1, 64: 0.05},  # chosen
            seeds=(0, 1, 2),
            num_seeds=3,
        ),
        Task(
            name="cifar",
            data="cifar",
            network=partial(ResidualNet, 8),  # 20 thousand parameters
            num_images=10_000,
            epochs=8,
            milestones=(4, 6, 7.2),
            learning_rate=0.01,  # chosen
            warm_up_epochs=0.8,  # chosen
            trust={4: 0.1, 16: 0.1, 64: 0.05},  # chosen
            seeds=(0, 1, 2, 3, 4),
            num_seeds=3,
        ),
    )
}


def load(task: Task, folder: str) -> Images:
    """Load the data of a task."""
    images = accuracy.load(replace(task.source, held_out=task.held_out), folder)
    inputs, labels = images.train
    if len(labels) < task.num_images:
        raise ValueError(f"{task.name} has {len(labels)} training images, not {task.num_images}")
    return replace(images, train=(inputs[: task.num_images], labels[: task.num_images]))
