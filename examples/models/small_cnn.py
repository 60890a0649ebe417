"""A small convolutional network with batch normalization, for digits and MNIST."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Images ``(batch, in_channels, image_size, image_size)`` to logits ``(batch, num_classes)``.

    Three convolutions, two of which halve height and width, and two linear layers: 0.4 million
    parameters for MNIST's 28 x 28. ``image_size`` is at least 4.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, image_size: int = 28) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(in_channels, 16),
            nn.MaxPool2d(2),
            *_convolution(16, 32),
            nn.MaxPool2d(2),
            *_convolution(32, 64),
        )
        side = image_size // 2 // 2
        self.classifier = nn.Sequential(
            nn.Linear(64 * side * side, 128),
            nn.ReLU(inplace=True),
            nn.Dropout(0.4),
            nn.Linear(128, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(torch.flatten(self.features(images), 1))


def _convolution(in_channels: int, out_channels: int) -> list[nn.Module]:
    return [
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    ]
