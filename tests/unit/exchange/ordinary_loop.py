"""The loop of an ordinary script with one of what its user may combine, on ranks or in one process.

Tests give it their own models, optimizers and steps, and compare the parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.contracts.suites.communicator_contracts import seeded
from tests.unit.models import fill, values
from torchmn import create_multi_node_optimizer
from torchmn.cluster import Topology
from torchmn.comm import Communicator, RouteName
from torchmn.testing import run_ranks


def model_of_layers(width: int = 6, num_hidden: int = 1) -> nn.Sequential:
    """A model whose input is 5 wide, with float64 parameters."""
    hidden = [each for _ in range(num_hidden) for each in (nn.Linear(width, width), nn.Tanh())]
    layers = nn.Linear(5, width), nn.Tanh(), *hidden, nn.Linear(width, 2)
    return fill(nn.Sequential(*layers).double())  # type: ignore[return-value]


def split_groups(model: nn.Module) -> list[list[nn.Parameter]]:
    """Matrices and vectors: for two optimizers whose parameters are mixed in a backward pass."""
    return [[p for p in model.parameters() if (p.ndim > 1) == first] for first in (True, False)]


def create(
    comm: Communicator | None,
    model: nn.Module,
    inner: Sequence[Optimizer],
    what: str,
    **options: str,
) -> Sequence[Optimizer]:
    """Multi-node optimizers with the options of ``what``; in one process the inner ones."""
    given = {"samples": {"weight": "samples"}, "view": {"gradient_as_bucket_view": True}}
    options |= given.get(what, {})  # type: ignore[arg-type]
    if comm is None:
        return inner
    return [create_multi_node_optimizer(each, comm, model, **options) for each in inner]  # type: ignore[arg-type]


def check_as_one_process(
    train: Callable[[Communicator | None], list[Tensor]],
    num_ranks: int,
    *,
    name: RouteName = "flat",
    tolerance: float = 1e-9,
) -> None:
    """All ranks, each a node of its own, have the parameters that ``train(None)`` returns."""
    expected = train(None)
    for result in run_ranks(train, num_ranks, name=name, topology=Topology.blocks([1] * num_ranks)):
        for here, there in zip(result, expected, strict=True):
            torch.testing.assert_close(here, there, rtol=tolerance, atol=tolerance)


def train(
    comm: Communicator | None,
    num_ranks: int,
    model: nn.Sequential,
    optimizers: Sequence[Optimizer],
    what: str,
    *,
    num_steps: int = 6,
    overflow: int = 3,
    reloads: Sequence[int] = (2,),
    is_frozen: Callable[[int], bool] = lambda step: step % 3 == 1,
) -> list[Tensor]:
    """Train on this rank's rows, or without ``comm`` on all; return the parameters.

    ``overflow`` is the step of which the last rank's loss is infinite, with a GradScaler; after
    the steps ``reloads`` the state is loaded again.
    """
    forward = torch.compile(model, backend="eager") if what == "compile" else model
    ema = torch.optim.swa_utils.AveragedModel(model) if what == "ema" else None
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=what == "scaler")
    rates = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers if what == "rates"]
    for step in range(num_steps):
        rows = seeded(0, 11 if what == "samples" else 12, 5, salt=step) / 10
        if what == "scaler" and step == overflow:
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
        if what == "reload" and step in reloads:
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if what == "freeze":
            model[0].requires_grad_(not is_frozen(step))
    return values(ema or model)
