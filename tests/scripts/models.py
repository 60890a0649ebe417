"""Small models. Ranks are threads that share one random generator, so they are built in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from .worker import NUM_INPUTS, NUM_OUTPUTS

Built = TypeVar("Built")
_BUILDING = threading.Lock()


def built(make: Callable[[], Built], seed: int = 0) -> Built:
    """What ``make`` returns under this seed, whatever other threads do."""
    with _BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def mlp(seed: int = 0) -> nn.Sequential:
    """``(batch, 5) -> (batch, 3)``, three layers."""
    return built(
        lambda: nn.Sequential(
            nn.Linear(NUM_INPUTS, 8),
            nn.Tanh(),
            nn.Linear(8, 6),
            nn.Tanh(),
            nn.Linear(6, NUM_OUTPUTS),
        ),
        seed,
    )


def convolutions(seed: int = 0) -> nn.Sequential:
    """``(batch, 3, 6, 6) -> (batch, 3)``."""
    return built(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.Tanh(),
            nn.Conv2d(4, 4, 3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, NUM_OUTPUTS),
        ),
        seed,
    )
