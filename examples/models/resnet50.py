"""Residual networks for ImageNet: He et al. 2016, https://arxiv.org/abs/1512.03385, table 1.

Modules have the names and shapes of torchvision's `resnet50` and `resnet18`, so that state dicts go
both ways. As there, and unlike the paper, the 3 x 3 convolution of a block has the stride.
"""

from __future__ import annotations

from torch import Tensor, nn

LAYOUTS: dict[str, tuple[bool, tuple[int, int, int, int]]] = {
    "resnet18": (False, (2, 2, 2, 2)),
    "resnet34": (False, (3, 4, 6, 3)),
    "resnet50": (True, (3, 4, 6, 3)),
    "resnet101": (True, (3, 4, 23, 3)),
}
"""Whether blocks have a bottleneck, and the blocks of each stage."""


class ImageNetResNet(nn.Module):
    """Images ``(batch, 3, height, width)`` to logits ``(batch, num_classes)``.

    Args:
        arch: one of `LAYOUTS`; resnet50 has 25,557,032 parameters.
        num_classes: the number of logits.
        width: channels of the first stage; 64 except in tests.
        zero_init_residual: begin with blocks that are the identity (Goyal et al., arXiv 1706.02677,
            section 5.1).
    """

    def __init__(
        self,
        arch: str = "resnet50",
        num_classes: int = 1000,
        width: int = 64,
        *,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        has_bottleneck, nums_blocks = LAYOUTS[arch]
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        in_channels = width
        for stage, num_blocks in enumerate(nums_blocks):
            blocks = []
            for number in range(num_blocks):
                stride = 2 if stage and number == 0 else 1
                blocks.append(Block(in_channels, width << stage, stride, has_bottleneck))
                in_channels = blocks[-1].out_channels
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(in_channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, Block) and zero_init_residual:
                nn.init.zeros_(module.last_norm.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class Block(nn.Module):
    """Two convolutions of 3 x 3, or with a bottleneck 1 x 1, 3 x 3 and 1 x 1, and the shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int, has_bottleneck: bool) -> None:
        super().__init__()
        self.out_channels = channels * (4 if has_bottleneck else 1)
        kernels = (1, 3, 1) if has_bottleneck else (3, 3)
        strides = (1, stride, 1) if has_bottleneck else (stride, 1)
        widths = (in_channels, *[channels] * (len(kernels) - 1), self.out_channels)
        for index, (kernel, step) in enumerate(zip(kernels, strides, strict=True)):
            layer = convolution(widths[index], widths[index + 1], kernel, step)
            setattr(self, f"conv{index + 1}", layer)
            setattr(self, f"bn{index + 1}", nn.BatchNorm2d(widths[index + 1]))
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride > 1 or in_channels != self.out_channels:
            self.downsample = nn.Sequential(
                convolution(in_channels, self.out_channels, 1, stride),
                nn.BatchNorm2d(self.out_channels),
            )
        self.has_bottleneck = has_bottleneck

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The normalization before the sum."""
        return self.bn3 if self.has_bottleneck else self.bn2

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum of the convolutions and the shortcut."""
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(inputs)))))
        if self.has_bottleneck:
            x = self.bn3(self.conv3(self.relu(x)))
        shortcut = inputs if self.downsample is None else self.downsample(inputs)
        return self.relu(x + shortcut)


def convolution(in_channels: int, out_channels: int, kernel: int, stride: int) -> nn.Conv2d:
    """A convolution without bias, which normalization would remove, and with padded edges."""
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)
