"""`auto` with what users combine it with: while it tries plans, ranks train as one process does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.unit.exchange import ordinary_loop
from torchmn import create_multi_node_optimizer
from torchmn.cluster import Topology
from torchmn.comm import Communicator
from torchmn.exchange.auto import tuner
from torchmn.testing import run_ranks

NUM_STEPS = (tuner.NUM_WARM_UP + tuner.NUM_TIMED) * 2 * tuner.MAX_TRIALS + 4
"""As many as it needs to try all plans twice, and some with the plan that it has chosen."""


def train(comm: Communicator | None = None, *, num_ranks: int, what: str) -> list[Tensor]:
    model = ordinary_loop.model_of_layers()
    groups = ordinary_loop.split_groups(model) if what == "two" else [[*model.parameters()]]
    optimizers = [torch.optim.SGD(group, 0.05, momentum=0.9) for group in groups]
    if comm is not None:
        weight = "samples" if what == "samples" else "rank"
        optimizers = [
            create_multi_node_optimizer(each, comm, model, schedule="auto", weight=weight)
            for each in optimizers
        ]
    found = ordinary_loop.train(
        comm,
        num_ranks,
        model,
        optimizers,
        what,
        num_steps=NUM_STEPS,
        overflow=9,
        reloads=(3, 20),
        is_frozen=lambda step: step % 10 == 7,
    )
    if comm is not None:
        assert all(len({t.plan for t in each.tuner.trials}) > 1 for each in optimizers)
    return found


@pytest.mark.parametrize(
    "what", ["clip", "scaler", "ema", "compile", "samples", "two", "reload", "freeze"]
)
def test_as_one_process(what: str) -> None:
    num_ranks = 3 if what == "samples" else 2
    run = partial(train, num_ranks=num_ranks, what=what)
    expected = run()
    nodes = Topology.blocks([1] * num_ranks)  # with one host there would be nothing to try
    for result in run_ranks(run, num_ranks, name="hierarchical", topology=nodes):
        for here, there in zip(result, expected, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)
