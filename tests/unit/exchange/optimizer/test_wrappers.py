"""Optimizers of libraries that wrap another, and do not call `torch.optim.Optimizer.__init__`."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import torchmn
from tests.ranks import on_ranks
from torchmn.errors import UnsupportedError
from torchmn.testing import run_ranks


class Bare(Optimizer):
    """As Opacus' DPOptimizer: an optimizer by name and by its groups only."""

    def __init__(self, inner: Optimizer) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Lookahead(Bare):
    """As that of pytorch_optimizer: it has the tables of hooks, and a state of its own form."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.defaults = {"period": 2}
        self.num_steps = 0
        self.slow = [p.detach().clone() for p in inner.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                    p.copy_(slow.lerp_(p, 0.5))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.slow, "num_steps": self.num_steps, "base": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.slow = [slow.clone() for slow in state["slow"]]
        self.num_steps = state["num_steps"]
        self.optimizer.load_state_dict(state["base"])


def train(comm: Any = None, *, num_before: int = 0) -> torch.Tensor:
    """Four clipped steps, after some without torchmn, which rank 0 alone makes."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).double()
    model = nn.Linear(3, 1).double()
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    inner = Lookahead(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for _ in range(num_before if comm is None or comm.rank == 0 else 0):
        inner.zero_grad()
        model(x).square().mean().backward()
        inner.step()
    optimizer: Any = inner
    if comm is not None:
        optimizer = torchmn.create_multi_node_optimizer(inner, comm, model, max_grad_norm=0.5)
        x = x.chunk(comm.size)[comm.rank]
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if comm is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_wrapper_with_a_step_and_a_state_of_its_own(num_before: int) -> None:
    wanted = train(num_before=num_before)
    for found in run_ranks(lambda comm: train(comm, num_before=num_before), 2):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@on_ranks(2)
def test_a_step_that_a_scheduler_has_wrapped_before_is_put_back(comm) -> None:
    model = nn.Linear(2, 1)
    inner = Lookahead(torch.optim.SGD(model.parameters(), 0.1))
    calls: list[int] = []
    plain = inner.step
    inner.step = lambda *a: (calls.append(1), plain(*a))[1]  # type: ignore[method-assign]
    own = inner.step
    optimizer = torchmn.create_multi_node_optimizer(inner, comm, model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.close()
    assert (len(calls), inner.step is own) == (1, True)


@on_ranks(2)
def test_an_optimizer_by_name_only_is_refused(comm) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UnsupportedError, match="Bare has not called __init__"):
        torchmn.create_multi_node_optimizer(
            Bare(torch.optim.SGD(model.parameters(), 0.1)), comm, model
        )
    assert not model._forward_pre_hooks
