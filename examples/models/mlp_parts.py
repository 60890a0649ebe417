"""The perceptron of the MNIST example, cut between layers."""

from __future__ import annotations

import torch
from torch import nn


def mlp_part(
    index: int,
    num_parts: int,
    *,
    num_inputs: int = 784,
    num_units: int = 1000,
    num_classes: int = 10,
    seed: int = 0,
) -> nn.Sequential:
    """Part ``index`` of the network, which is the same for any ``num_parts`` (1 to 3)."""
    torch.manual_seed(seed)
    layers = [
        nn.Sequential(nn.Flatten(), nn.Linear(num_inputs, num_units), nn.ReLU()),
        nn.Sequential(nn.Linear(num_units, num_units), nn.ReLU()),
        nn.Linear(num_units, num_classes),
    ]
    first, end = (len(layers) * i // num_parts for i in (index, index + 1))
    return nn.Sequential(*layers[first:end])
