"""The networks of the examples."""

from __future__ import annotations

from .gpt import GPT
from .mlp import MLP
from .mlp_parts import mlp_part
from .resnet import ResNet
from .resnet50 import ImageNetResNet
from .small_cnn import SmallCNN
from .transformer import Transformer
from .vgg import VGG

__all__ = [
    "GPT",
    "MLP",
    "VGG",
    "ImageNetResNet",
    "ResNet",
    "SmallCNN",
    "Transformer",
    "mlp_part",
]
