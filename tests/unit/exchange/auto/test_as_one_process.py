"""`auto` with what users combine it with: while it tries plans, ranks train as one process does."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.contracts.suites.communicator_contracts import seeded
from tests.unit.models import fill, values
from torchmn import create_multi_node_optimizer
from torchmn.cluster import Topology
from torchmn.comm import Communicator
from torchmn.exchange.auto import tuner
from torchmn.testing import run_ranks

NUM_STEPS = (tuner.NUM_WARM_UP + tuner.NUM_TIMED) * 2 * tuner.MAX_TRIALS + 4
"""As many as it needs to try all plans twice, and some with the plan that it has chosen."""
OVERFLOW = 9
"""The step of which the last rank's loss is infinite, with a GradScaler."""


def train(comm: Communicator | None = None, *, num_ranks: int, what: str) -> list[Tensor]:
    """Train on this rank's rows, or on all."""
    layers = nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)
    model = fill(nn.Sequential(*layers).double())
    parts = [[p for p in model.parameters() if (p.ndim > 1) == first] for first in (True, False)]
    groups = parts if what == "two" else [[*model.parameters()]]
    optimizers = [torch.optim.SGD(group, 0.05, momentum=0.9) for group in groups]
    if comm is not None:
        weight = "samples" if what == "samples" else "rank"
        optimizers = [
            create_multi_node_optimizer(each, comm, model, schedule="auto", weight=weight)
            for each in optimizers
        ]
    forward = torch.compile(model, backend="eager") if what == "compile" else model
    ema = torch.optim.swa_utils.AveragedModel(model) if what == "ema" else None
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=what == "scaler")
    for step in range(NUM_STEPS):
        rows = seeded(0, 11 if what == "samples" else 12, 5, salt=step) / 10
        if what == "scaler" and step == OVERFLOW:
            rows[-1] = float("inf")
        own = rows if comm is None else torch.tensor_split(rows, num_ranks)[comm.rank]
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(forward(own).square().mean()).backward()
        for optimizer in optimizers if what in ("scaler", "clip") else ():
            scaler.unscale_(optimizer)
        if what in ("scaler", "clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        if ema is not None:
            ema.update_parameters(model)
        if what == "reload" and step in (3, 20):
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if what == "freeze":
            model[0].requires_grad_(step % 10 != 7)
    if comm is not None:
        assert all(len({t.plan for t in each.tuner.trials}) > 1 for each in optimizers)
    return values(ema or model)


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
