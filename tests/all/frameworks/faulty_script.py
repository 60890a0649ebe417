"""Run on two ranks by test_start.py: rank 1 raises, or does not come to the next exchange.

Arguments: the framework, and ``raise`` or ``sleep``.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.limits import limit
from torchmn.train.frameworks import ExchangeOptions, attach, lightning_strategy

FRAMEWORK, FAULT = sys.argv[1:]
OPTIONS = ExchangeOptions(timeout_s=limit(4))
DATA = TensorDataset(torch.ones(400, 3), torch.ones(400, 1))


class Net(nn.Module):
    """The fault is in its fifth forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.num_calls = 0

    def forward(self, inputs: Any, labels: Any = None) -> Any:
        self.num_calls += 1
        if self.num_calls == 5 and os.environ["RANK"] == "1":
            if FAULT == "raise":
                raise ValueError("the cause")
            time.sleep(1000)
        outputs = self.layer(inputs)
        if labels is None:
            return outputs
        return {"loss": nn.functional.mse_loss(outputs, labels)}


def by_lightning() -> None:
    import lightning

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


def by_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = attach(Accelerator(cpu=True), OPTIONS)
    net = Net()
    model, optimizer, data = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.01), DataLoader(DATA, batch_size=4)
    )
    for inputs, targets in data:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()


def by_transformers() -> None:
    from transformers import Trainer, TrainingArguments

    rows = [{"inputs": x, "labels": y} for x, y in DATA]
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    attach(Trainer(Net(), arguments, train_dataset=rows), OPTIONS).train()


{
    "lightning": by_lightning,
    "accelerate": by_accelerate,
    "transformers": by_transformers,
}[FRAMEWORK]()
