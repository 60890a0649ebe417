"""Multi-node optimizers as frameworks use them: closures, and states of all ranks in one."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from torchmn import create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.errors import CheckpointWarning
from torchmn.testing import run_ranks
from torchmn.train.frameworks.exchange import RANKS, FrameworkOptimizer


def make(comm: Communicator, inner: str = "SGD", **options: Any) -> FrameworkOptimizer:
    model = nn.Linear(40, 10)
    generator = torch.Generator().manual_seed(0)  # ranks are threads, and share the default one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)
    torch_optimizer = getattr(torch.optim, inner)(model.parameters(), lr=0.1)
    made = create_multi_node_optimizer(torch_optimizer, comm, model, **options)
    made.__class__ = FrameworkOptimizer
    own = cast(FrameworkOptimizer, made)
    own.model = model  # type: ignore[attr-defined]
    return own


def backward(optimizer: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + optimizer.communicator.rank)
    loss = optimizer.model(torch.randn(4, 40, generator=generator)).square().mean()
    loss.backward()
    return cast(Tensor, loss.detach())


def test_a_closure_is_run_first() -> None:
    """It exchanges once, and its loss stays the rank's own."""

    def rank_main(comm: Communicator) -> tuple[list[Tensor], float, bool]:
        plain, ours = make(comm), make(comm)
        losses = []
        for step in range(3):
            plain.zero_grad()
            own = backward(plain, step)
            plain.step()

            def closure(step: int = step) -> float:
                ours.zero_grad()
                return cast(float, backward(ours, step))

            with torch.no_grad():
                losses.append((ours.step(closure), own))
        a, b = (list(each.model.parameters()) for each in (plain, ours))  # type: ignore[attr-defined]
        is_same = all(map(torch.equal, a, b))
        return b, float(losses[0][0] or 0), is_same and all(x == y for x, y in losses)

    results = run_ranks(rank_main, 2)
    assert all(is_same for _, _, is_same in results)
    assert results[0][1] != results[1][1], "a mean over ranks"


def test_lbfgs_gets_its_closure() -> None:
    def rank_main(comm: Communicator) -> int:
        optimizer = make(comm, "LBFGS")
        calls = []

        def closure() -> float:
            calls.append(1)
            optimizer.zero_grad()
            return cast(float, backward(optimizer, 0))

        optimizer.step(closure)
        return len(calls)

    assert min(run_ranks(rank_main, 2)) > 1


def train(optimizer: FrameworkOptimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        backward(optimizer, step)
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"codec": "1bit"},
        {"schedule": "double_buffering"},
        {"schedule": "periodic_average"},
    ],
    ids=str,
)
def test_rank_0_saves_what_every_rank_needs(options: dict[str, Any]) -> None:
    def rank_main(comm: Communicator) -> bool:
        whole = make(comm, **options)
        train(whole, 0, 4)
        state = whole.gathered_state_dict()
        assert comm.rank or RANKS in state
        model = {k: v.clone() for k, v in whole.model.state_dict().items()}  # type: ignore[attr-defined]
        saved = comm.bcast_obj(state if comm.rank == 0 else None)
        train(whole, 4, 8)
        again = make(comm, **options)
        again.model.load_state_dict(model)  # type: ignore[attr-defined]
        again.load_state_dict(saved)
        train(again, 4, 8)
        pairs = zip(whole.model.parameters(), again.model.parameters(), strict=True)  # type: ignore[attr-defined]
        return all(torch.equal(a, b) for a, b in pairs)

    assert run_ranks(rank_main, 2) == [True, True]


def test_the_state_of_rank_0_alone_is_not_enough() -> None:
    """The test above can fail: another rank would begin without its residuals."""

    def rank_main(comm: Communicator) -> None:
        whole = make(comm, codec="1bit")
        train(whole, 0, 4)
        saved = comm.bcast_obj(whole.state_dict() if comm.rank == 0 else None)
        again = make(comm, codec="1bit")
        if comm.rank == 0:
            again.load_state_dict(saved)
            return
        with pytest.raises(CheckpointWarning, match="this rank starts without residuals"):
            again.load_state_dict(saved)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("codec", [None, "1bit"])
def test_another_number_of_ranks_loads_it(codec: str | None) -> None:
    def save(comm: Communicator) -> dict[str, Any]:
        optimizer = make(comm, codec=codec)
        train(optimizer, 0, 4)
        return optimizer.gathered_state_dict()

    saved = run_ranks(save, 2)[0]

    def load(comm: Communicator) -> int:
        optimizer = make(comm, codec=codec)
        optimizer.load_state_dict(saved)
        train(optimizer, 4, 6)
        return optimizer.reducer.step

    assert run_ranks(load, 3) == [6, 6, 6]


def test_a_plain_optimizer_loads_it() -> None:
    def rank_main(comm: Communicator) -> bool:
        optimizer = make(comm, "Adam", codec="1bit")
        train(optimizer, 0, 2)
        state = optimizer.gathered_state_dict()
        plain = torch.optim.Adam(nn.Linear(40, 10).parameters())
        plain.load_state_dict(state)
        return bool(plain.state_dict()["state"])

    assert run_ranks(rank_main, 2)[0]
