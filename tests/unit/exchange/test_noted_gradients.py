"""Gradients that autograd only notes: what a bucket waits for, on 2 ranks as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import on_ranks
from torchmn import create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.errors import TorchmnError, UnsupportedError
from torchmn.exchange.backward_pass import Passes
from torchmn.exchange.early_packing import EarlyPacking
from torchmn.exchange.parameter_hook import Arrivals, GradientHooks
from torchmn.testing import run_ranks

SIZE, NUM_STEPS, WIDTH = 2, 6, 4
Branches = nn.ModuleList
Script = Callable[[Branches, Any, int, Tensor, Any], None]
"""One step, from the model, the optimizer, the number of the step, the batch and the rank."""


def branches() -> Branches:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))


def loss_of(model: Branches, x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Autograd computes the gradients of the branch that is added last first."""
    total = x.new_zeros(())
    for number in order:
        total = total + model[number](x).tanh().mean()
    return total


def in_one_order(model: Branches, optimizer: Any, step: int, x: Tensor, rank: int) -> None:
    loss_of(model, x, (0, 1, 2)).backward()


def in_another_order_each_time(
    model: Branches, optimizer: Any, step: int, x: Tensor, rank: int
) -> None:
    orders = (0, 1, 2), (2, 0, 1), (1, 2, 0)
    loss_of(model, x, orders[(step + rank) % 3]).backward()


def a_part_of_a_bucket(model: Branches, optimizer: Any, step: int, x: Tensor, rank: int) -> None:
    loss_of(model, x, (step % 3,)).backward()


def other_parts_on_ranks(model: Branches, optimizer: Any, step: int, x: Tensor, rank: int) -> None:
    """Each rank has half of the batch, and each half of it has a branch of its own."""
    halves = x.chunk(SIZE) if rank < 0 else [x]
    for half, number in zip(halves, (step % 3, (step + 1) % 3) if rank < 0 else (0,), strict=False):
        branch = number if rank < 0 else (step + rank) % 3
        with optimizer.no_sync() if rank < 0 else nullcontext():
            (loss_of(model, half, (branch,)) * len(half) / len(x)).backward()


def accumulated(model: Branches, optimizer: Any, step: int, x: Tensor, rank: int) -> None:
    with optimizer.no_sync():
        loss_of(model, x, (0, 1)).backward()
    loss_of(model, -x, (1, 2)).backward()


def two_passes_of_one_graph(
    model: Branches, optimizer: Any, step: int, x: Tensor, rank: int
) -> None:
    loss = loss_of(model, x, (0, 1, 2))
    loss.backward(retain_graph=True)
    (loss_of(model, x, (2,)) + 0.5 * loss).backward()


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise MemoryError("out of memory")


def after_a_pass_that_raised(
    model: Branches, optimizer: Any, step: int, x: Tensor, rank: int
) -> None:
    """The next pass has only gradients that were noted in this one."""
    with suppress(MemoryError):
        (_Raises.apply(model[0](x)).mean() + loss_of(model, x, (1, 2))).backward()
    optimizer.zero_grad()
    loss_of(model, x, (step % 3,)).backward()


def triple(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(3.0)


def with_a_later_hook(model: Branches, optimizer: Any, step: int, x: Tensor, rank: int) -> None:
    """Hooks of the script change gradients, the one that comes last too, from the third step on."""
    if step == 2:
        for parameter in (model[1].weight, *model[0].parameters()):
            parameter.register_post_accumulate_grad_hook(triple)
    loss_of(model, x, (0, 1, 2)).backward()


def with_a_hook_that_clears(
    model: Branches, optimizer: Any, step: int, x: Tensor, rank: int
) -> None:
    if step == 2:
        weight = model[1].weight
        weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    loss_of(model, x, (0, 1, 2)).backward()


def with_a_pass_inside(model: Branches, optimizer: Any, step: int, x: Tensor, rank: int) -> None:
    """A pass inside of another one adds to gradients that are noted and not packed yet."""
    hidden = x.clone().requires_grad_()
    last = loss_of(model, x, (0,))
    for _ in range(2):
        hidden = checkpoint(model[1], hidden, use_reentrant=True).tanh()
    (last + hidden.mean() + loss_of(model, x, (2,))).backward()


SCRIPTS: list[Script] = [
    in_one_order,
    in_another_order_each_time,
    a_part_of_a_bucket,
    other_parts_on_ranks,
    accumulated,
    two_passes_of_one_graph,
    after_a_pass_that_raised,
    with_a_later_hook,
    with_a_hook_that_clears,
]


class _Alone:
    """The optimizer of one process."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def no_sync(self) -> Any:
        return nullcontext()

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        self.inner.step()


def batch(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def trained(script: Script, optimizer: Any, model: Branches, rank: int) -> list[Tensor]:
    for step in range(NUM_STEPS):
        x = batch(step)
        optimizer.zero_grad()
        script(model, optimizer, step, x if rank < 0 else x.chunk(SIZE)[rank], rank)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)  # of means, which are there by now
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def holds(script: Script, bucket_bytes: int, **options: Any) -> bool:
    first = branches().double()
    model = copy.deepcopy(first)
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    expected = trained(script, _Alone(sgd), model, -1)

    def rank_main(comm: Communicator) -> list[Tensor]:
        model = copy.deepcopy(first)
        sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        optimizer = create_multi_node_optimizer(sgd, comm, model, **options)
        reducer = optimizer.reducer
        reducer.reconfigure(comm, reducer.codec, bucket_bytes=bucket_bytes)
        try:
            return trained(script, optimizer, model, comm.rank)
        finally:
            optimizer.close()

    return all(
        torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)
        for found in run_ranks(rank_main, SIZE)
        for ours, theirs in zip(found, expected, strict=True)
    )


pytestmark = pytest.mark.filterwarnings("ignore:More than one backward pass before step")
ALL, SOME = 1 << 20, 200
"""Bytes of a bucket: of all parameters, and of about two."""


@pytest.mark.parametrize("bucket_bytes", [ALL, SOME])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_as_one_process(script: Script, bucket_bytes: int) -> None:
    assert holds(script, bucket_bytes)


def test_a_pass_inside_of_another_one_as_one_process() -> None:
    assert holds(with_a_pass_inside, ALL)


@pytest.mark.parametrize("script", SCRIPTS[:3], ids=lambda script: script.__name__)
def test_slots_as_gradients_as_one_process(script: Script) -> None:
    assert holds(script, SOME, gradient_as_bucket_view=True)


Patch = Callable[[pytest.MonkeyPatch], None]


def a_pass_does_not_end_the_notes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientHooks, "call_again", lambda self: None)


def a_pass_that_raised_does_not_end_them(patch: pytest.MonkeyPatch) -> None:
    begin = Passes.begin

    def begin_only(self: Passes, callback: Any, on_release: Any, **options: Any) -> Any:
        return begin(self, callback, lambda: None, **options)

    patch.setattr(Passes, "begin", begin_only)


def counts_only(patch: pytest.MonkeyPatch) -> None:
    are_enough = property(lambda self: len(self) >= len(self.numbers))
    patch.setattr(Arrivals, "are_complete", are_enough)
    patch.setattr(EarlyPacking, "_refuse_repeated", lambda self, bucket: None)


def later_hooks_are_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientHooks, "have_later", lambda self, numbers: False)


BROKEN: dict[Patch, tuple[Script, int]] = {
    a_pass_does_not_end_the_notes: (a_part_of_a_bucket, ALL),
    a_pass_that_raised_does_not_end_them: (after_a_pass_that_raised, ALL),
    counts_only: (with_a_pass_inside, ALL),
    later_hooks_are_not_looked_for: (with_a_later_hook, ALL),
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_one_is_noticed(broken: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    try:
        found = holds(*BROKEN[broken])
    except TorchmnError:
        found = False
    assert not found


@on_ranks(SIZE)
def test_a_gradient_that_comes_again_after_it_was_packed_is_refused(comm: Communicator) -> None:
    model = branches()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = create_multi_node_optimizer(sgd, comm, model)
    optimizer.reducer.reconfigure(comm, None, bucket_bytes=SOME)

    def step(*, is_repeated: bool) -> None:
        optimizer.zero_grad()
        hidden = torch.ones(2, WIDTH, requires_grad=True)
        for _ in range(2 if is_repeated else 1):
            hidden = checkpoint(model[1], hidden, use_reentrant=True)
        (hidden.mean() + loss_of(model, torch.ones(2, WIDTH), (0, 2))).backward()
        optimizer.step()

    for _ in range(3):
        step(is_repeated=False)
    with pytest.raises(UnsupportedError, match=r"gradient of '1\..*' twice in one"):
        step(is_repeated=True)
    step(is_repeated=False)
    optimizer.close()
