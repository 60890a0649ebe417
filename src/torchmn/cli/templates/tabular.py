"""Train a classifier of rows of a table on one worker or many: torchmn run -n 2 train.py

Written by `torchmn init`. `load_data` and `build_model` are what you will change first.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import torchmn
from torchmn.errors import DataError

DATA_HELP = ".csv file: titles, then numbers, the class last (default: artificial)"
RATE = 3e-3


def load_data(path: str | None) -> list[Subset]:
    """Training and test rows, each (columns, class); any data sets with lengths will do."""
    if path is not None:  # one line of titles, then numbers; the last column is the class
        try:
            table = torch.tensor(np.loadtxt(path, np.float32, delimiter=",", skiprows=1, ndmin=2))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is no table of numbers below titles: {error}") from None
        rows, classes = table[:, :-1], table[:, -1].long()
        are_whole = (classes.clamp_min(0) == table[:, -1]).all()
        if not (rows.numel() and table.isfinite().all() and are_whole):
            raise DataError(f"{path} must have columns of numbers, last that of classes 0, 1, ...")
    else:  # artificial ones
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(5000, 20, generator=generator)
        classes = (rows @ torch.randn(20, 3, generator=generator)).argmax(1)
    rows = (rows - rows.mean(0)) / rows.std(0).clamp_min(1e-6)
    data = TensorDataset(rows, classes)
    return random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))


def build_model(train: Subset) -> nn.Module:
    """A model from rows (batch, columns) to scores (batch, classes)."""
    rows, classes = train.dataset.tensors
    return nn.Sequential(
        nn.Linear(rows.shape[1], 64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, int(classes.max()) + 1),
    )


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean loss over a batch."""
    return cross_entropy(scores, targets)
