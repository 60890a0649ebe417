"""`auto` with what users combine it with: while it tries plans, ranks train as one process does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.exchange import ordinary_loop
from torchmn.comm import Communicator
from torchmn.exchange.auto import tuner

NUM_STEPS = (tuner.NUM_WARM_UP + tuner.NUM_TIMED) * 2 * tuner.MAX_TRIALS + 4
"""As many as it needs to try all plans twice, and some with the plan that it has chosen."""


@pytest.mark.parametrize(
    "what", ["clip", "scaler", "ema", "compile", "samples", "two", "reload", "freeze"]
)
def test_as_one_process(what: str) -> None:
    num_ranks = 3 if what == "samples" else 2

    def train(comm: Communicator | None) -> list[Tensor]:
        model = ordinary_loop.model_of_layers()
        groups = ordinary_loop.split_groups(model) if what == "two" else [[*model.parameters()]]
        inner = [torch.optim.SGD(group, 0.05, momentum=0.9) for group in groups]
        weight = "samples" if what == "samples" else "rank"
        options = {"schedule": "auto", "weight": weight}
        optimizers = ordinary_loop.create(comm, model, inner, what, **options)
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

    # With one host there would be nothing to try.
    ordinary_loop.check_as_one_process(train, num_ranks, name="hierarchical")
