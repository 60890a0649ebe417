"""VGG with batch normalization for images of 32 x 32, as in Chainer's CIFAR example.

13 convolutions of 3 x 3 (Simonyan and Zisserman, 2014, https://arxiv.org/abs/1409.1556) with the
batch normalization and dropout of http://torch.ch/blog/2015/07/30/cifar.html: 15.0 million
parameters. Weights start as in Chainer: normal with variance 1 / fan-in.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

# Channels of the convolutions of each block, and the dropout between them.
BLOCKS: tuple[tuple[tuple[int, ...], float], ...] = (
    ((64, 64), 0.3),
    ((128, 128), 0.4),
    ((256, 256, 256), 0.4),
    ((512, 512, 512), 0.4),
    ((512, 512, 512), 0.4),
)


class VGG(nn.Module):
    """Images ``(batch, in_channels, 32, 32)`` to logits ``(batch, num_classes)``."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(*_feature_layers(in_channels))
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(512, 512, bias=False),
            nn.BatchNorm1d(512, eps=2e-5),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(512, num_classes, bias=False),
        )
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                fan_in = layer.weight[0].numel()
                nn.init.normal_(layer.weight, std=fan_in**-0.5)

    def forward(self, images: Tensor) -> Tensor:
        """Logits; the first linear layer rejects images of another size."""
        return self.classifier(torch.flatten(self.features(images), 1))


def _feature_layers(in_channels: int) -> Iterator[nn.Module]:
    """Five blocks, each of which ends by halving height and width."""
    for widths, dropout in BLOCKS:
        for position, width in enumerate(widths):
            if position > 0:
                yield nn.Dropout(dropout)
            yield nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
            yield nn.BatchNorm2d(width, eps=2e-5)
            yield nn.ReLU(inplace=True)
            in_channels = width
        yield nn.MaxPool2d(2)
