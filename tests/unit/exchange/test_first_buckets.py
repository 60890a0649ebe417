"""Small first buckets with what users combine them with: ranks train as one process does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.unit.exchange import ordinary_loop
from torchmn import create_multi_node_optimizer
from torchmn.cluster import Topology
from torchmn.comm import Communicator
from torchmn.testing import run_ranks

OPTIONS = {"samples": {"weight": "samples"}, "view": {"gradient_as_bucket_view": True}}


def train(comm: Communicator | None = None, *, num_ranks: int, what: str) -> list[Tensor]:
    model = ordinary_loop.model_of_layers(width=200, num_hidden=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1)  # sums of 200 products would make rounding grow in each layer
    groups = ordinary_loop.split_groups(model) if what == "two" else [[*model.parameters()]]
    optimizers = [torch.optim.SGD(group, 0.05, momentum=0.9) for group in groups]
    if comm is not None:
        options = OPTIONS.get(what, {})
        wrapped = [create_multi_node_optimizer(o, comm, model, **options) for o in optimizers]
        assert len(wrapped[0].reducer.exchange.filling.buckets) == {2: 3, 3: 2}[num_ranks]
        optimizers = [*wrapped]
    return ordinary_loop.train(
        comm,
        num_ranks,
        model,
        optimizers,
        what,
        num_steps=6,
        overflow=3,
        reloads=(2,),
        is_frozen=lambda step: step % 3 == 1,
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "what", ["clip", "scaler", "ema", "compile", "samples", "view", "two", "reload", "freeze"]
)
def test_as_one_process(what: str, num_ranks: int) -> None:
    run = partial(train, num_ranks=num_ranks, what=what)
    expected = run()
    nodes = Topology.blocks([1] * num_ranks)  # within one host buckets are not cut so
    for result in run_ranks(run, num_ranks, name="hierarchical", topology=nodes):
        for here, there in zip(result, expected, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)
