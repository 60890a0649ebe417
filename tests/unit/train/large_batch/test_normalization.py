"""Ghost batch normalization, and weight decay without normalization."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torchmn.comm import Communicator
from torchmn.errors import UnsupportedError, UsageError
from torchmn.nn import convert_batch_norm
from torchmn.testing import run_ranks
from torchmn.train.large_batch import (
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
    convert_to_ghost_batch_norm,
    revert_ghost_batch_norm,
    weight_decay_groups,
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3)
    ).double()


@pytest.mark.parametrize(
    ("ghost", "plain", "shape"),
    [
        (GhostBatchNorm1d, nn.BatchNorm1d, (12, 3)),
        (GhostBatchNorm1d, nn.BatchNorm1d, (12, 3, 5)),
        (GhostBatchNorm2d, nn.BatchNorm2d, (12, 3, 4, 2)),
        (GhostBatchNorm3d, nn.BatchNorm3d, (12, 3, 2, 2, 2)),
    ],
)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_as_batch_normalization_of_one_part_after_another(
    ghost: type, plain: type, shape: tuple[int, ...], momentum: float | None
) -> None:
    x = torch.randn(shape, dtype=torch.float64) * 3 + 1
    ours, theirs = (
        ghost(3, 4, momentum=momentum, dtype=torch.float64),
        plain(3, momentum=momentum, dtype=torch.float64),
    )
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, wanted = ours(a), torch.cat([theirs(part) for part in b.split(4)])
    assert y.equal(wanted)
    y.square().sum().backward()
    wanted.square().sum().backward()
    assert a.grad is not None
    assert a.grad.equal(b.grad)
    for name, value in theirs.state_dict().items():
        assert ours.state_dict()[name].equal(value)
    assert ours.eval()(x).equal(theirs.eval()(x))


@pytest.mark.parametrize("ghost", [2, 3, 4])
@pytest.mark.parametrize("rows", range(2, 13))
def test_no_part_has_one_sample(rows: int, ghost: int) -> None:
    """Which torch refuses without other dimensions, and normalizes by itself with them."""
    num_parts = max(1, min(math.floor(rows / ghost + 0.5), rows // 2))
    sizes = [rows // num_parts + (i < rows % num_parts) for i in range(num_parts)]
    assert min(sizes) >= 2
    for ours, theirs, shape in (
        (GhostBatchNorm1d(3, ghost), nn.BatchNorm1d(3), (rows, 3)),
        (GhostBatchNorm2d(3, ghost), nn.BatchNorm2d(3), (rows, 3, 2, 2)),
    ):
        x = torch.randn(shape)
        assert ours(x).equal(torch.cat([theirs(part) for part in x.split(sizes)]))
        assert ours.num_batches_tracked == num_parts
    assert GhostBatchNorm2d(3, ghost)(torch.randn(1, 3, 2, 2)).shape == (1, 3, 2, 2)


def test_conversion_keeps_objects_and_can_be_reverted() -> None:
    original = model()
    converted = convert_to_ghost_batch_norm(copy.deepcopy(original), 4)
    assert [type(m) for m in converted if hasattr(m, "ghost_batch")] == [
        GhostBatchNorm2d,
        GhostBatchNorm1d,
    ]
    assert "ghost_batch=4" in repr(converted)
    assert "ghost_batch=8" in repr(convert_to_ghost_batch_norm(converted, 8))
    assert converted.state_dict().keys() == original.state_dict().keys()
    parameters = list(converted.parameters())
    back = revert_ghost_batch_norm(converted)
    assert back is converted
    assert [type(m) for m in back] == [type(m) for m in original]
    assert all(a is b for a, b in zip(back.parameters(), parameters, strict=True))
    assert vars(back[1]).keys() == vars(original[1]).keys()


def test_other_classes_are_refused_before_anything_changes() -> None:
    mixed = nn.Sequential(nn.BatchNorm1d(3), nn.LazyBatchNorm1d())
    with pytest.raises(UnsupportedError, match="'1' is a LazyBatchNorm1d"):
        convert_to_ghost_batch_norm(mixed, 4)
    assert type(mixed[0]) is nn.BatchNorm1d
    for wrong in (1, 0, 2.5):
        with pytest.raises(UsageError, match="ghost_batch"):
            convert_to_ghost_batch_norm(mixed[0], wrong)

    def convert(comm: Communicator) -> None:
        with pytest.raises(UnsupportedError, match="revert_batch_norm"):
            convert_to_ghost_batch_norm(convert_batch_norm(model(), comm), 4)

    run_ranks(convert, 1)


def test_parametrized_layers_keep_their_class() -> None:
    ghost = convert_to_ghost_batch_norm(model(), 4)
    parametrize.register_parametrization(ghost[4], "weight", nn.Identity())
    with pytest.raises(UnsupportedError, match=r"'4' is a Parametrized.*GhostBatchNorm1d, 2d or"):
        revert_ghost_batch_norm(ghost)
    assert type(ghost[1]) is GhostBatchNorm2d
    assert "ghost_batch=8" in repr(convert_to_ghost_batch_norm(ghost, 8)[4])
    parametrize.remove_parametrizations(ghost[4], "weight")
    revert_ghost_batch_norm(ghost)
    assert type(ghost[4]) is nn.BatchNorm1d
    parametrize.register_parametrization(ghost[4], "weight", nn.Identity())
    with pytest.raises(UnsupportedError, match="'4' is a ParametrizedBatchNorm1d"):
        convert_to_ghost_batch_norm(ghost, 4)
    assert type(ghost[1]) is nn.BatchNorm2d


def test_one_process_as_two_ranks_with_plain_batch_normalization() -> None:
    x = torch.randn(8, 2, 4, 4, dtype=torch.float64)
    ranks = [model(), model()]
    outputs = run_ranks(lambda comm: ranks[comm.rank](x.tensor_split(2)[comm.rank]).detach(), 2)
    assert convert_to_ghost_batch_norm(model(), 4)(x).allclose(torch.cat(outputs))


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
