"""Small networks and data, the same on every rank without the shared random generator."""

from typing import Any

import pytorch_pfn_extras as ppe
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Line(nn.Module):
    """A least squares fit that reports its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -0.25], dtype=torch.float64))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = ((inputs @ self.weight - targets) ** 2).mean()
        ppe.reporting.report({"loss": loss}, self)
        return loss


def points(n: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 2, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, inputs @ torch.tensor([1.0, 2.0], dtype=torch.float64))


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})
