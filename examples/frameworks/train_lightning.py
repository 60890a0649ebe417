"""Train a perceptron on digits with Lightning's Trainer: two changed lines, marked (1) and (2).

torchmn run -n 2 examples/frameworks/train_lightning.py
python examples/frameworks/train_lightning.py --devices 2    # Lightning starts the processes
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torchmn.train.frameworks import ExchangeOptions, lightning_strategy  # (1)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from datasets import load_images
from models import MLP


class Digits(lightning.LightningModule):
    """Nothing in a LightningModule changes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MLP(num_inputs=64, num_units=100)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        right = (self(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits with Lightning.")
    number = int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument("--devices", type=int, default=number, help="processes on this machine")
    parser.add_argument("--codec", help="form in which gradients are sent, such as int8")
    parser.add_argument("--epoch", type=int, default=3, help="number of epochs")
    options = parser.parse_args()
    lightning.seed_everything(0)
    images = load_images("digits", None).normalised()
    trainer = lightning.Trainer(
        max_epochs=options.epoch,
        accelerator="cpu",
        devices=options.devices,
        strategy=lightning_strategy(ExchangeOptions(codec=options.codec)),  # (2)
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = Digits()
    trainer.fit(
        model,
        DataLoader(images.train, batch_size=64 // options.devices, shuffle=True),
        DataLoader(images.test, batch_size=64),
    )
    if trainer.is_global_zero:
        print(f"accuracy {float(trainer.callback_metrics['accuracy']):.4f}")


if __name__ == "__main__":
    main()
