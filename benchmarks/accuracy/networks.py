"""Networks small enough for a run of seconds, large enough that codecs have work."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DigitNet(nn.Module):
    """Two convolutions and two linear layers, 54 thousand parameters, for MNIST."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 5, padding=2, bias=False),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 5, padding=2, bias=False),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 28, 28) to logits."""
        return self.layers(images)


class ResidualNet(nn.Module):
    """Three residual blocks at 16, 8 and 4 pixels, 78 thousand parameters, for CIFAR.

    He et al., "Deep Residual Learning for Image Recognition", 2015, section 4.2, with n = 1 and
    a first convolution of stride 2, which makes a run four times shorter.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            _Block(width, width), _Block(width, 2 * width), _Block(2 * width, 4 * width)
        )
        self.last = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, 32, 32) to logits."""
        hidden = self.blocks(torch.relu(self.norm(self.first(images))))
        return self.last(hidden.mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        stride = 1 if num_in == num_out else 2
        self.first = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(num_out)
        self.second = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(num_out)
        self.shortcut = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))
