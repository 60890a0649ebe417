"""Residual networks for CIFAR-10: He et al. 2016, https://arxiv.org/abs/1512.03385, section 4.2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ResNet(nn.Module):
    """Images ``(batch, 3, 32, 32)`` to logits ``(batch, num_classes)``.

    A convolution, three stages of ``num_blocks`` blocks of two convolutions, a linear layer: with 3
    blocks it is the paper's ResNet-20 of 0.27 million parameters. Shortcuts have no parameters.
    """

    def __init__(self, num_classes: int = 10, num_blocks: int = 3) -> None:
        super().__init__()
        blocks = []
        in_channels = 16
        for stage, channels in enumerate((16, 32, 64)):
            for number in range(num_blocks):
                stride = 2 if stage and number == 0 else 1
                blocks.append(Block(in_channels, channels, stride))
                in_channels = channels
        self.features = nn.Sequential(*convolution(3, 16), nn.ReLU(inplace=True), *blocks)
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(self.features(images).mean(dim=(2, 3)))


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.num_new = channels - in_channels
        self.layers = nn.Sequential(
            *convolution(in_channels, channels, stride),
            nn.ReLU(inplace=True),
            *convolution(channels, channels),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Every ``stride``-th pixel of the input is added, with zeros for new channels."""
        shortcut = inputs[:, :, :: self.stride, :: self.stride]
        shortcut = functional.pad(shortcut, (0, 0, 0, 0, 0, self.num_new))
        return torch.relu(self.layers(inputs) + shortcut)


def convolution(in_channels: int, out_channels: int, stride: int = 1) -> list[nn.Module]:
    """A convolution of 3 x 3 with batch normalization."""
    layer = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return [layer, nn.BatchNorm2d(out_channels)]
