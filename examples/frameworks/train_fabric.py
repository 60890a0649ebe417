"""Train a perceptron on digits with Lightning Fabric: two changed lines, marked (1) and (2).

torchmn run -n 2 examples/frameworks/train_fabric.py
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader

from torchmn.train.frameworks import ExchangeOptions, fabric_strategy  # (1)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from datasets import load_images
from models import MLP


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits with Fabric.")
    parser.add_argument("--codec", help="form in which gradients are sent, such as int8")
    parser.add_argument("--epoch", type=int, default=3, help="number of epochs")
    options = parser.parse_args()
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=fabric_strategy(ExchangeOptions(codec=options.codec)),  # (2)
    )
    fabric.launch()
    fabric.seed_everything(0)
    images = load_images("digits", None).normalised()
    model = MLP(num_inputs=64, num_units=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    train = DataLoader(images.train, batch_size=64 // fabric.world_size, shuffle=True)
    train = fabric.setup_dataloaders(train)
    for _ in range(options.epoch):
        for inputs, labels in train:
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
    model.eval()
    with torch.no_grad():
        inputs, labels = images.test.tensors
        own = slice(fabric.global_rank, None, fabric.world_size)
        right = (model(inputs[own]).argmax(1) == labels[own]).sum().float()
    accuracy = fabric.all_reduce(right, reduce_op="sum") / len(labels)
    fabric.print(f"accuracy {float(accuracy):.4f}")


if __name__ == "__main__":
    main()
