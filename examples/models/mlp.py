"""The perceptron of Chainer's MNIST example: 784-1000-1000-10."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Images ``(batch, ...)`` of ``num_inputs`` values each to logits ``(batch, num_classes)``."""

    def __init__(self, num_classes: int = 10, num_inputs: int = 784, num_units: int = 1000) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_inputs, num_units),
            nn.ReLU(),
            nn.Linear(num_units, num_units),
            nn.ReLU(),
            nn.Linear(num_units, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.layers(torch.flatten(images, 1))
