"""Weight decay without biases and normalization."""

import pytest
import torch
from torch import Tensor, nn

from torchmn.errors import UsageError
from torchmn.train.large_batch import weight_decay_groups


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3)
    )


def test_groups_without_weight_decay() -> None:
    class Scaled(nn.Module):
        """A normalization of the user's own."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.temperature = nn.Parameter(torch.tensor(1.0))

    net = nn.Sequential(model(), nn.LayerNorm(3), Scaled(), nn.Linear(3, 3))
    net[3].weight = net[0][3].weight  # shared
    decayed, others = weight_decay_groups(net, 0.1)
    names = {parameter: name for name, parameter in net.named_parameters()}

    def named(group: dict[str, list[Tensor]]) -> list[str]:
        return [names[parameter] for parameter in group["params"]]

    assert named(decayed) == ["0.0.weight", "0.3.weight"]
    assert len(others["params"]) == len(names) - 2
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    optimizer = torch.optim.SGD([decayed, others], lr=1.0)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: p.clone() for name, p in net.named_parameters()}
    optimizer.step()
    changed = {n for n, p in net.named_parameters() if not p.equal(before[n])}
    assert changed == {"0.0.weight", "0.3.weight"}


def test_groups_of_what_is_not_known_or_wrong() -> None:
    assert [len(g["params"]) for g in weight_decay_groups(nn.LayerNorm(3), 0.1)] == [2]
    with pytest.raises(UsageError, match="forward pass"):
        weight_decay_groups(nn.LazyLinear(3), 0.1)
    with pytest.raises(UsageError, match="weight_decay=-1"):
        weight_decay_groups(nn.Linear(2, 2), -1.0)
