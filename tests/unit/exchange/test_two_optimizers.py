"""Two optimizers that share each backward pass: ranks have the parameters of one process."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.contracts.suites.communicator_contracts import seeded
from tests.unit.models import fill, values
from torchmn import create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.testing import run_ranks

NUM_STEPS = 6
OVERFLOW = 3
"""The step of which the last rank's loss is infinite, with a GradScaler."""


def model_of_layers() -> nn.Sequential:
    layers = nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)
    return fill(nn.Sequential(*layers).double())  # type: ignore[return-value]


def optimizers_of(model: nn.Module, comm: Communicator | None, what: str, *, is_reversed: bool):
    """One for matrices and one for vectors, so that the layers of both are mixed."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    inner = [torch.optim.SGD(matrices, 0.1, momentum=0.9), torch.optim.AdamW(vectors, 0.02)]
    if comm is not None:
        comm.route.bucket_bytes = 200  # so that each has several
        options = {
            "samples": {"weight": "samples"},
            "view": {"gradient_as_bucket_view": True},
        }.get(what, {})
        inner = [create_multi_node_optimizer(each, comm, model, **options) for each in inner]
    return inner[::-1] if is_reversed else inner


def train(
    comm: Communicator | None = None, *, num_ranks: int, what: str, is_reversed: bool
) -> list[Tensor]:
    """Train on this rank's rows, or on all; ``is_reversed``: the optimizers step in that order."""
    model = model_of_layers()
    optimizers = optimizers_of(model, comm, what, is_reversed=is_reversed)
    forward = torch.compile(model, backend="eager") if what == "compile" else model
    ema = torch.optim.swa_utils.AveragedModel(model) if what == "ema" else None
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=what == "scaler")
    rates = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers if what == "rates"]
    for step in range(NUM_STEPS):
        rows = seeded(0, 11 if what == "samples" else 12, 5, salt=step) / 10
        if what == "scaler" and step == OVERFLOW:
            rows[-1] = float("inf")
        own = rows if comm is None else torch.tensor_split(rows, num_ranks)[comm.rank]
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(forward(own).square().mean()).backward()
        if what in ("scaler", "clip"):
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for rate in rates:
            rate.step()
        if ema is not None:
            ema.update_parameters(model)
        if what == "reload" and step == 2:
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if what == "freeze":
            model[0].requires_grad_(step % 3 != 1)
    return values(ema or model)


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "what",
    ["plain", "clip", "scaler", "ema", "compile", "samples", "view", "rates", "reload", "freeze"],
)
def test_as_one_process(what: str, num_ranks: int, is_reversed: bool) -> None:
    run = partial(train, num_ranks=num_ranks, what=what, is_reversed=is_reversed)
    expected = run()
    for result in run_ranks(run, num_ranks):
        for here, there in zip(result, expected, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-12)
