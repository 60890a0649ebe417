"""Messages of sixteen bits: near, and the same on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.ranks import on_ranks
from tests.unit.models import fill, optimizer_of
from torchmn import create_multi_node_optimizer
from torchmn.testing import run_ranks


@pytest.mark.parametrize("name", ["naive", "flat", "single_node", "two_dimensional"])
def test_large_gradients_do_not_overflow_in_the_sum(name: str) -> None:
    """The sum of four 40000 is beyond float16, their mean is not (ChainerMN added first)."""

    def rank_main(comm):
        model = fill(nn.Linear(1, 3, bias=False))
        optimizer_of(comm, model, codec="float16")
        model(torch.full((1, 1), 40000.0)).sum().backward()
        assert model.weight.grad.tolist() == [[40000.0]] * 3

    run_ranks(rank_main, 4, name=name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64])
@on_ranks(3)
def test_other_dtypes_pass_through_a_codec(comm, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    model = nn.ParameterList([weight])
    create_multi_node_optimizer(torch.optim.SGD([weight], 0.1), comm, model, codec="bfloat16")
    (weight * (comm.rank + 1)).abs().sum().backward()
    assert weight.grad.dtype == dtype
    assert weight.grad.real.tolist() == pytest.approx([2.0] * 3, rel=1e-2)
