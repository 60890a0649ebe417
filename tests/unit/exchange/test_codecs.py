"""Messages of sixteen bits: near, and the same on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.models import fill
from torchmn import create_multi_node_optimizer
from torchmn.cluster import Topology
from torchmn.testing import run_ranks


def test_the_codec_of_the_communicator_is_used() -> None:
    def rank_main(comm):
        model = fill(nn.Linear(64, 64))
        create_multi_node_optimizer(torch.optim.SGD(model.parameters(), 0.1), comm, model)
        model(torch.full((1, 64), comm.rank + 1.0)).sum().backward()
        assert "scatter_float16" in {entry.name for entry in comm.flight_recorder.entries()}

    run_ranks(rank_main, 2, topology=Topology.blocks([1, 1]), allreduce_grad_dtype="float16")


@pytest.mark.parametrize("name", ["naive", "flat", "single_node", "two_dimensional"])
def test_large_gradients_do_not_overflow_in_the_sum(name: str) -> None:
    """The sum of four 40000 is beyond float16, their mean is not (ChainerMN added first)."""

    def rank_main(comm):
        model = fill(nn.Linear(1, 3, bias=False))
        create_multi_node_optimizer(
            torch.optim.SGD(model.parameters(), 0.1), comm, model, codec="float16"
        )
        model(torch.full((1, 1), 40000.0)).sum().backward()
        assert model.weight.grad.tolist() == [[40000.0]] * 3

    run_ranks(rank_main, 4, name=name)


@pytest.mark.parametrize("codec", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so_on_all_ranks(value: float, codec: str | None) -> None:
    def rank_main(comm):
        model = fill(nn.Linear(2, 2, bias=False))
        create_multi_node_optimizer(
            torch.optim.SGD(model.parameters(), 0.1), comm, model, codec=codec
        )
        x = torch.ones(1, 2)
        if comm.rank == 2:
            x[0, 0] = value
        model(x).sum().backward()
        assert model.weight.grad[:, 1].tolist() == [1.0, 1.0]
        return model.weight.grad[:, 0].clone()

    for column in run_ranks(rank_main, 3):
        assert torch.equal(column, torch.full((2,), value)) or column.isnan().all()
        assert not column.isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64])
def test_other_dtypes_pass_through_a_codec(dtype: torch.dtype) -> None:
    def rank_main(comm):
        weight = nn.Parameter(torch.ones(3, dtype=dtype))
        model = nn.ParameterList([weight])
        create_multi_node_optimizer(torch.optim.SGD([weight], 0.1), comm, model, codec="bfloat16")
        (weight * (comm.rank + 1)).abs().sum().backward()
        assert weight.grad.dtype == dtype
        assert weight.grad.real.tolist() == pytest.approx([2.0] * 3, rel=1e-2)

    run_ranks(rank_main, 3)
