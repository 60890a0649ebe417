"""Sums over ranks, for losses that are sums over the batch: as one process on the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import on_ranks
from tests.unit.models import batch, equal, fill, mlp, near, optimizer_of, values, wrap
from torchmn import create_multi_node_optimizer
from torchmn.cluster import Topology
from torchmn.errors import RankMismatchError, UnknownNameError, UnsupportedError, UsageError
from torchmn.exchange.schedules import BlockMomentum
from torchmn.testing import run_ranks

NUM_STEPS = 5
SIZES = {1: [9], 2: [6, 3], 3: [4, 1, 4], 4: [3, 2, 0, 4]}
"""Samples of each rank in a step; in all of them together there are nine."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)


def wide() -> nn.Sequential:
    """Parameters that are large enough to be encoded."""
    model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64))
    return fill(model)  # type: ignore[return-value]


def summed_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).sum()


def parts(step: int, sizes: list[int]) -> list[Tensor]:
    """What each rank has: the samples of the step are the same for any number of ranks."""
    return list(batch(0, step, 9).split(sizes))


def train_alone(num_steps: int = NUM_STEPS) -> list[Tensor]:
    model = mlp()
    inner = sgd(model)
    for step in range(num_steps):
        inner.zero_grad()
        summed_loss(model, batch(0, step, 9)).backward()
        inner.step()
    return values(model)


def train(comm, **options: object) -> list[Tensor]:
    model, optimizer = wrap(comm, sgd, reduction="sum", **options)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        summed_loss(model, parts(step, SIZES[comm.size])[comm.rank]).backward()
        optimizer.step()
    optimizer.flush()
    return values(model)


@pytest.mark.parametrize("name", ["naive", "flat", "hierarchical", "two_dimensional"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_process_on_the_whole_batch(name: str, size: int) -> None:
    for result in run_ranks(train, size, name=name):
        assert near(result, train_alone())


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "int8", "int4", "1bit", "power_sgd"])
def test_codecs_lose_of_a_sum_what_they_lose_of_a_mean(codec: str) -> None:
    """What was applied and the residuals add up to W times those of the mean."""

    def applied(comm, reduction: str, codec: str | None = codec) -> list[Tensor]:
        model = wide()
        optimizer = optimizer_of(comm, model, lr=0.0, codec=codec, reduction=reduction)
        total = [torch.zeros_like(p) for p in model.parameters()]
        for step in range(12):
            optimizer.zero_grad()
            x = batch(comm.rank, step, dtype=torch.float32)
            summed_loss(model, x).backward()
            for sum_, parameter in zip(total, model.parameters(), strict=True):
                sum_ += parameter.grad
            optimizer.step()
        return total

    topology = Topology.blocks([1, 1])
    means = run_ranks(lambda comm: applied(comm, "mean"), 2, name="flat", topology=topology)
    sums = run_ranks(lambda comm: applied(comm, "sum"), 2, name="flat", topology=topology)
    assert equal(sums[0], sums[1])
    assert equal(sums[0], [2 * mean for mean in means[0]])
    exact = run_ranks(lambda comm: applied(comm, "sum", None), 2, name="flat", topology=topology)
    assert not equal(sums[0], exact[0]), "nothing was encoded: the test shows nothing"


@pytest.mark.filterwarnings("ignore:More than one backward pass")
@pytest.mark.parametrize("steps_between", [False, True])
@on_ranks(2)
def test_a_second_exchange_of_a_sum_is_refused_on_all_ranks(comm, steps_between: bool) -> None:
    model, optimizer = wrap(comm, sgd, reduction="sum")
    summed_loss(model, batch(comm.rank, 0)).backward()
    if steps_between:
        optimizer.step()
    with pytest.raises(UnsupportedError, match="no_sync"):
        summed_loss(model, batch(comm.rank, 1)).backward()


@on_ranks(2)
def test_join_adds_the_ranks_that_still_have_data(comm) -> None:
    model, optimizer = wrap(comm, sgd, reduction="sum")
    with optimizer.join():
        for step in range(NUM_STEPS if comm.rank == 0 else 2):
            optimizer.zero_grad()
            own = parts(step, [5, 4])[comm.rank] if step < 2 else batch(0, step, 9)
            summed_loss(model, own).backward()
            optimizer.step()
    assert near(values(model), train_alone())


def test_closures_see_the_sum_of_the_losses() -> None:
    def with_lbfgs(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(
            torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4), comm, model, reduction="sum"
        )
        losses = []
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = summed_loss(model, parts(step, SIZES[comm.size])[comm.rank])
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
        return [*values(model), *losses]

    [alone] = run_ranks(with_lbfgs, 1)
    for result in run_ranks(with_lbfgs, 2):
        assert near(result, alone)


def test_a_rank_of_weight_zero_adds_nothing() -> None:
    def left_out(comm):
        model, optimizer = wrap(comm, sgd, reduction="sum")
        optimizer.set_weight(float(comm.rank == 0))
        summed_loss(model, batch(comm.rank, 0)).backward()
        return [p.grad.clone() for p in model.parameters()]

    model = mlp()
    summed_loss(model, batch(0, 0)).backward()
    for result in run_ranks(left_out, 2):
        assert near(result, [p.grad for p in model.parameters()])


def test_gradients_under_no_sync_keep_their_sum_on_another_number_of_ranks() -> None:
    """Two ranks accumulate, are saved, and one or three continue."""
    saved: list[dict[str, object]] = []

    def begin(comm):
        model, optimizer = wrap(comm, sgd, reduction="sum")
        with optimizer.no_sync():
            summed_loss(model, parts(0, [6, 3])[comm.rank]).backward()
        return optimizer.state_dict()

    saved[:] = run_ranks(begin, 2)

    def continue_(comm):
        model, optimizer = wrap(comm, sgd, reduction="sum")
        optimizer.load_state_dict(optimizer.reshard_state_dict(saved, comm))
        summed_loss(model, parts(1, SIZES[comm.size])[comm.rank]).backward()
        return [p.grad.clone() for p in model.parameters()]

    model = mlp()
    for step in range(2):
        summed_loss(model, batch(0, step, 9)).backward()
    for size in (1, 3):
        for result in run_ranks(continue_, size):
            assert near(result, [p.grad for p in model.parameters()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": "samples"}, "weight='samples' and reduction='sum' contradict"),
        ({"schedule": "periodic_average"}, "under periodic_average each rank steps with its own"),
        ({"schedule": BlockMomentum(64)}, "under block_momentum each rank"),
        ({"schedule": "diloco"}, "under diloco each rank"),
        ({"schedule": "parameter_server"}, "under parameter_server each rank"),
    ],
)
@on_ranks(2)
def test_what_has_no_sum(comm, options: dict[str, object], message: str) -> None:
    model = mlp()
    with pytest.raises(UnsupportedError, match=message):
        create_multi_node_optimizer(sgd(model), comm, model, reduction="sum", **options)


@on_ranks(2)
def test_names_weights_and_ranks_that_differ(comm) -> None:
    model = mlp()
    with pytest.raises(UnknownNameError, match="reduction"):
        create_multi_node_optimizer(sgd(model), comm, model, reduction="total")
    optimizer = create_multi_node_optimizer(sgd(model), comm, model, reduction="sum")
    with pytest.raises(UsageError, match="gradients are added as they are"):
        optimizer.set_weight(8)
    optimizer.close()
    with pytest.raises(RankMismatchError, match="reduction"):
        create_multi_node_optimizer(sgd(model), comm, model, reduction=["sum", "mean"][comm.rank])
