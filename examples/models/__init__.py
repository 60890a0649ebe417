"""The networks of the examples."""

from __future__ import annotations

from .mlp import MLP
from .small_cnn import SmallCNN
from .vgg import VGG

__all__ = ["MLP", "VGG", "SmallCNN"]
