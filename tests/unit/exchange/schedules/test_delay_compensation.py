"""The correction of late means; the contracts of schedules have more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.models import batch, equal, grads, local_grads, loss_of, mlp, near, values
from torchmn import create_multi_node_optimizer
from torchmn.errors import UnsupportedError, UsageError
from torchmn.exchange.schedules import DoubleBuffering
from torchmn.testing import run_ranks

FACTOR = 3.0


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


@pytest.mark.parametrize(("reduction", "scale"), [("mean", 1), ("sum", 2)])
def test_what_the_script_sees_is_corrected(reduction: str, scale: int) -> None:
    """Clipping comes after it."""

    def rank_main(comm):
        model = mlp()
        schedule = DoubleBuffering(delay_compensation=FACTOR)
        optimizer = create_multi_node_optimizer(
            momentum(model), comm, model, schedule=schedule, reduction=reduction
        )
        then, mean = [], []
        for step in range(3):
            optimizer.zero_grad()
            before = values(model)
            own = local_grads(model, batch(comm.rank, step))
            loss_of(model, batch(comm.rank, step)).backward()
            for got, g, w, w_then in zip(grads(model), mean, before, then, strict=False):
                assert near([got], [scale * (g + FACTOR * g * g * (w - w_then))])
            mean, then = [comm.allreduce(g, "mean") for g in own], before
            optimizer.step()

    run_ranks(rank_main, 2)


def test_frozen_and_unused_parameters_have_no_gradient_either() -> None:
    def rank_main(comm):
        model = nn.ModuleDict({"used": mlp(), "unused": mlp(4)})
        model["used"][0].weight.requires_grad_(False)
        before = values(model["unused"])
        schedule = DoubleBuffering(delay_compensation=FACTOR)
        optimizer = create_multi_node_optimizer(momentum(model), comm, model, schedule=schedule)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model["used"], batch(comm.rank, step)).backward()
            optimizer.step()
        assert grads(model["unused"]) == [None] * 4
        assert equal(values(model["unused"]), before)

    run_ranks(rank_main, 2)


def test_arguments_that_contradict_each_other() -> None:
    with pytest.raises(UsageError, match=r"eager=True and delay_compensation=1\.0 cannot be"):
        DoubleBuffering(eager=True, delay_compensation=1.0)
    for factor in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="must be 0 or positive"):
            DoubleBuffering(delay_compensation=factor)


def test_sparse_gradients_are_refused() -> None:
    def rank_main(comm):
        model = nn.Embedding(5, 3, sparse=True)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(UnsupportedError, match=r"needs dense gradients, and those of \['wei"):
            create_multi_node_optimizer(
                sgd, comm, model, schedule=DoubleBuffering(delay_compensation=1.0)
            )

    run_ranks(rank_main, 2)
