"""Run on two ranks by test_start.py: rank 1 raises, or does not come to the next exchange."""

import os
import sys
import time
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.limits import limit
from torchmn.train.frameworks import ExchangeOptions, lightning_strategy

[FAULT] = sys.argv[1:]
OPTIONS = ExchangeOptions(timeout_s=limit(4))
DATA = TensorDataset(torch.ones(400, 3), torch.ones(400, 1))


class Net(nn.Module):
    """The fault is in its fifth forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.num_calls = 0

    def forward(self, inputs: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == 5 and os.environ["RANK"] == "1":
            if FAULT == "raise":
                raise ValueError("the cause")
            time.sleep(1000)
        return self.layer(inputs)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, index: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=2,
    strategy=lightning_strategy(OPTIONS),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
).fit(Module(), DataLoader(DATA, batch_size=4))
