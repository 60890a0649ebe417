"""Train a perceptron on digits with Accelerate: two changed lines, marked (1) and (2).

torchmn run -n 2 examples/frameworks/train_accelerate.py
accelerate launch --cpu --num_processes 2 examples/frameworks/train_accelerate.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from torchmn.train.frameworks import ExchangeOptions, attach  # (1)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from datasets import load_images
from models import MLP


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits with Accelerate.")
    parser.add_argument("--codec", help="form in which gradients are sent, such as int8")
    parser.add_argument("--epoch", type=int, default=3, help="number of epochs")
    options = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    attach(accelerator, ExchangeOptions(codec=options.codec))  # (2)
    torch.manual_seed(0)
    images = load_images("digits", None).normalised()
    model = MLP(num_inputs=64, num_units=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    size = accelerator.num_processes
    train = DataLoader(images.train, batch_size=64 // size, shuffle=True)
    test = DataLoader(images.test, batch_size=64)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for _ in range(options.epoch):
        for inputs, labels in train:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
    model.eval()
    right = []
    with torch.no_grad():
        for inputs, labels in test:
            right.append(accelerator.gather_for_metrics(model(inputs).argmax(1) == labels))
    accelerator.print(f"accuracy {float(torch.cat(right).float().mean()):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
