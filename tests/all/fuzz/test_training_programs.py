"""Random training programs: several ranks have the gradients and parameters of one process.

hypothesis draws the programs and shrinks one that fails to the shortest that does. The same
programs are drawn in each run; TORCHMN_TEST_PROGRAMS is their number.
"""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.contracts.suites.communicator_contracts import seeded
from tests.unit.models import fill
from torchmn import create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.exchange.gradient_exchange import GradientExchange
from torchmn.testing import run_ranks

NUM_PROGRAMS = int(os.environ.get("TORCHMN_TEST_PROGRAMS", "25"))
ROWS = 12  # so that 2, 3 and 4 ranks have equal parts


@dataclass(frozen=True)
class Step:
    """One step of a program: what its script does around `backward`."""

    clear: str = "optimizer"
    forward: str = "plain"
    uses_branch: bool = True
    passes: str = "one"
    change: str = "none"
    hook: str = "none"
    raises_first: bool = False
    freezes: bool = False
    steps: int = 1
    reloads: bool = False
    rate: float = 1.0


@dataclass(frozen=True)
class Program:
    """A training script."""

    num_ranks: int
    split: str  # of the parameters among optimizers
    kind: str
    view: bool
    bucket_bytes: int | None
    route: str
    steps: list[Step] = field(default_factory=list)


STEPS = st.builds(
    Step,
    clear=st.sampled_from(["optimizer", "zeros", "model", "never"]),
    forward=st.sampled_from(["plain", "checkpoint", "reentrant"]),
    uses_branch=st.booleans(),
    passes=st.sampled_from(
        ["one", "one", "two", "retained", "accumulated", "no_sync", "only_no_sync", "inputs"]
    ),
    change=st.sampled_from(["none", "none", "clip", "scale", "replace", "drop"]),
    hook=st.sampled_from(["none", "none", "tensor", "after", "module"]),
    raises_first=st.sampled_from([False, False, False, True]),
    freezes=st.sampled_from([False, False, False, True]),
    steps=st.sampled_from([1, 1, 1, 0, 2]),
    reloads=st.sampled_from([False, False, False, True]),
    rate=st.sampled_from([1.0, 1.0, 0.5]),
)
PROGRAMS = st.builds(
    Program,
    num_ranks=st.sampled_from([2, 2, 3, 4]),
    split=st.sampled_from(["one", "one", "by shape", "by layer"]),
    kind=st.sampled_from(["SGD", "Adam"]),
    view=st.booleans(),
    bucket_bytes=st.sampled_from([None, 64, 300, 1200]),
    route=st.sampled_from(["flat", "naive"]),
    steps=st.lists(STEPS, min_size=1, max_size=6),
)


class Model(nn.Module):
    """Layers of which one may be recomputed and one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.recomputed, self.branch = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last, self.scale = nn.Linear(8, 3), nn.Parameter(torch.ones(()))
        fill(self.double())

    def forward(self, x: Tensor, step: Step) -> Tensor:
        hidden = self.first(x).tanh() * self.scale
        inner = self.recomputed
        if step.forward == "plain":
            hidden = inner(hidden).tanh()
        else:
            hidden = checkpoint(inner, hidden, use_reentrant=step.forward == "reentrant").tanh()
        return self.last(hidden + self.branch(hidden).tanh() if step.uses_branch else hidden)


class Boom(Exception):
    """Raised in a backward pass."""


def boom(gradient: Tensor) -> Tensor:
    raise Boom


def halve(parameter: Tensor) -> None:
    parameter.grad *= 0.5


def optimizers_of(program: Program, model: nn.Module, comm: Communicator | None):
    named = list(model.named_parameters())
    is_second = {
        "one": lambda name, p: False,
        "by shape": lambda name, p: p.ndim < 2,
        "by layer": lambda name, p: name.startswith(("first", "branch")),
    }[program.split]
    parts = [[p for name, p in named if is_second(name, p) == kind] for kind in (False, True)]
    make = {"SGD": partial(torch.optim.SGD, momentum=0.9), "Adam": torch.optim.Adam}[program.kind]
    inner = [make(part, lr=0.05) for part in parts if part]
    if comm is None:
        return inner
    if program.bucket_bytes:
        comm.route.bucket_bytes = program.bucket_bytes
    view = program.view
    return [
        create_multi_node_optimizer(o, comm, model, gradient_as_bucket_view=view) for o in inner
    ]


def hooks_of(step: Step, model: Model):
    if step.hook == "tensor":
        return [p.register_hook(lambda g: g * 1.5) for p in model.parameters() if p.requires_grad]
    if step.hook == "after":
        return [model.last.weight.register_post_accumulate_grad_hook(halve)]
    if step.hook == "module":
        return [model.last.register_full_backward_hook(lambda m, g, _: (g[0] * 0.9,))]
    return []


def backward(step: Step, model: Model, x: Tensor, parts: list[Tensor], optimizers) -> None:
    """The backward passes of a step; ``parts`` are the halves of ``x``, of each rank's rows."""

    def loss_of(rows: Tensor) -> Tensor:
        return model(rows, step).square().sum() / len(x)

    is_local = [hasattr(o, "no_sync") for o in optimizers]
    with contextlib.ExitStack() as stack:
        if step.passes == "only_no_sync" and all(is_local):
            for optimizer in optimizers:
                stack.enter_context(optimizer.no_sync())
        if step.passes == "two":
            loss_of(x).backward()
            (model(x, step).abs().mean() * 0.3).backward()
        elif step.passes == "retained":
            loss = loss_of(x)
            loss.backward(retain_graph=True)
            loss.backward()
        elif step.passes in ("accumulated", "no_sync"):
            for index, part in enumerate(parts):
                with contextlib.ExitStack() as inner:
                    if step.passes == "no_sync" and index == 0 and all(is_local):
                        for optimizer in optimizers:
                            inner.enter_context(optimizer.no_sync())
                    loss_of(part).backward()
        elif step.passes == "inputs" and step.forward != "reentrant":
            loss_of(x).backward(inputs=list(model.last.parameters()))
        else:
            loss_of(x).backward()


def change(step: Step, model: Model) -> None:
    gradients = [p for p in model.parameters() if p.grad is not None]
    if step.passes == "only_no_sync":  # they are the rank's own, whose change is refused
        return
    if step.change == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    for parameter in gradients:
        if step.change == "scale":
            parameter.grad *= 0.7
        elif step.change == "replace":
            parameter.grad = parameter.grad * 0.7
    if step.change == "drop":
        model.scale.grad = None


def run(program: Program, comm: Communicator | None = None) -> list[list[Tensor]]:
    """Train on the rank's rows, or on all of them; returns what is compared."""
    model, seen = Model(), []
    optimizers = optimizers_of(program, model, comm)
    for index, step in enumerate(program.steps):
        everyone = torch.chunk(seeded(0, ROWS, 5, salt=index), program.num_ranks)
        mine = everyone if comm is None else (everyone[comm.rank],)
        x = torch.cat(mine)
        halves = [torch.cat([rows.chunk(2)[i] for rows in mine]) for i in range(2)]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= step.rate
            if step.clear in ("optimizer", "zeros"):
                optimizer.zero_grad(set_to_none=step.clear == "optimizer")
        if step.clear == "model":
            model.zero_grad()
        model.branch.requires_grad_(not step.freezes)
        if step.raises_first:
            handle = model.first.weight.register_hook(boom)
            with contextlib.suppress(Boom):
                backward(Step(), model, x, halves, optimizers)
            handle.remove()
            for optimizer in optimizers:
                optimizer.zero_grad()
        hooks = hooks_of(step, model)
        backward(step, model, x, halves, optimizers)
        change(step, model)
        if step.passes != "only_no_sync":
            seen.append([torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()])
            seen[-1] = [tensor.clone() for tensor in seen[-1]]
        for _ in range(step.steps):
            for optimizer in optimizers:
                optimizer.step()
        for hook in hooks:
            hook.remove()
        if step.reloads:
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
    return seen


def is_right(program: Program) -> bool:
    """Whether all ranks have what one process has; False if they were refused."""
    expected = run(program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = run_ranks(partial(run, program), program.num_ranks, name=program.route)
    return all(
        torch.allclose(here, there, rtol=1e-9, atol=1e-9)
        for result in results
        for tensors, others in zip(result, expected, strict=True)
        for here, there in zip(tensors, others, strict=True)
    )


PROFILE = settings(
    max_examples=NUM_PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


@PROFILE
@given(PROGRAMS)
def test_ranks_have_the_results_of_one_process(program: Program) -> None:
    assert is_right(program)


def test_a_program_that_exchanges_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: gradients stay those of the rank."""
    monkeypatch.setattr(GradientExchange, "assign", GradientExchange.discard)

    @settings(PROFILE, phases=[Phase.generate])
    @given(PROGRAMS)
    def notices(program: Program) -> None:
        assert is_right(program)

    with pytest.raises(AssertionError):
        notices()
