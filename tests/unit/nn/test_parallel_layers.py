"""Refusals, copies, formats, compilation and training of layers divided among ranks."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from tests.contracts.suites.communicator_contracts import seeded
from tests.contracts.suites.parallel_layer_contracts import built, network
from torchmn import Grid, create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.errors import (
    NonFiniteGradientError,
    RankMismatchError,
    UnknownNameError,
    UnsupportedError,
    UsageError,
)
from torchmn.nn import (
    ParallelConv2d,
    ParallelLinear,
    clip_grad_norm_,
    gather_state_dict,
    share_nonfinite_,
)
from torchmn.nn.parallel_layer import Split
from torchmn.testing import run_ranks
from torchmn.train.large_batch import LAMB, LARS


def test_what_cannot_be_divided_is_refused() -> None:
    def rank_main(comm):
        with pytest.raises(UsageError, match="1 output channels cannot be divided among 2 ranks"):
            ParallelLinear(3, 1, comm)
        with pytest.raises(UnsupportedError, match="groups=2"):
            ParallelConv2d(4, 4, 3, comm, groups=2)
        with pytest.raises(UnknownNameError, match="split"):
            ParallelLinear(3, 4, comm, split="rows")  # type: ignore[arg-type]
        layer = ParallelLinear(4, 3, comm, split="input")
        with pytest.raises(UsageError, match=r"takes 4 input channels.*\[1, 2\]"):
            layer(torch.zeros(1, 2))

    run_ranks(rank_main, 2)


def test_different_inputs_of_ranks_are_named() -> None:
    def rank_main(comm):
        layer = ParallelLinear(4, 3, comm, split="input")
        shapes = r"shape \[2, 4\] on rank 0, shape \[3, 4\] on rank 1"
        with pytest.raises(RankMismatchError, match=shapes):
            layer(torch.zeros(2 + comm.rank, 4))
        layer.eval()
        layer(seeded(0, 200, 4).float() + 1e-3 * comm.rank)  # rounded otherwise

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("split", ["output", "input"])
def test_different_samples_of_ranks_are_named(split: Split) -> None:
    """As with a sampler over all ranks, in training and in evaluation."""

    def rank_main(comm: Communicator) -> None:
        layer = ParallelLinear(4, 6, comm, split=split)
        for mode in (layer.eval, layer.train):
            mode()
            with pytest.raises(RankMismatchError, match="The input of a ParallelLinear must be"):
                layer(seeded(comm.rank, 8, 4).float())

    run_ranks(rank_main, 2)


def test_different_dropout_of_ranks_is_named() -> None:
    def rank_main(comm: Communicator) -> None:
        layer = ParallelLinear(4, 6, comm)
        kept = seeded(comm.rank, 8, 6) > 0
        loss = (layer(seeded(0, 8, 4).float()) * kept).sum()
        with pytest.raises(RankMismatchError, match="The gradient of the output of a Parallel"):
            loss.backward()

    run_ranks(rank_main, 2)


def test_copies_and_pickles() -> None:
    def rank_main(comm):
        model = built(lambda: network(comm))
        x = torch.zeros(2, 5, 6, 6, dtype=torch.float64)
        assert torch.equal(copy.deepcopy(model)(x), model(x))
        loaded = pickle.loads(pickle.dumps(model))
        assert "no ranks" in repr(loaded)
        assert "2 ranks" in repr(model)
        with pytest.raises(UsageError, match="loaded from a pickle.*Make the model again"):
            loaded(x)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_formats(dtype: torch.dtype) -> None:
    def rank_main(comm):
        layer = built(lambda: ParallelConv2d(3, 4, 1, comm)).to(dtype)
        layer = layer.to(memory_format=torch.channels_last)
        x = torch.ones(2, 3, 4, 4, dtype=dtype).to(memory_format=torch.channels_last)
        y = layer(x.requires_grad_())
        y.sum().backward()
        assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == dtype
        whole = built(lambda: nn.Conv2d(3, 4, 1)).to(dtype)
        torch.testing.assert_close(y, whole(x))

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("split", ["output", "input"])
def test_autocast(split: Split) -> None:
    def rank_main(comm: Communicator) -> None:
        x = seeded(0, 2, 4).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = built(lambda: ParallelLinear(4, 6, comm, split=split)).float()(x)
            expected = built(lambda: nn.Linear(4, 6)).float()(x)
        assert y.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(y, expected, rtol=0.1, atol=0.1)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("split", ["output", "input"])
def test_initial_values_are_drawn_again(split: Split) -> None:
    """Values that depend on the size of the whole, and as many draws as for the whole."""

    def rank_main(comm: Communicator) -> None:
        def drawn(model: nn.Module) -> nn.Module:
            for layer in model:
                layer.reset_parameters()
            return model

        whole = built(lambda: nn.Sequential(nn.Linear(5, 7), nn.Conv2d(5, 7, 3), nn.Linear(5, 7)))
        divided = built(
            lambda: nn.Sequential(
                ParallelLinear(5, 7, comm, split=split),
                ParallelConv2d(5, 7, 3, comm, split=split),
                nn.Linear(5, 7),
            )
        )
        kept = [*divided.parameters()]
        expected = built(lambda: drawn(whole)).state_dict()
        found = gather_state_dict(built(lambda: drawn(divided)))
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values)
        assert all(p is q for p, q in zip(divided.parameters(), kept, strict=True))

    run_ranks(rank_main, 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled() -> None:
    def rank_main(comm):
        model = built(lambda: network(comm))
        compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
        for net in (model, compiled):
            net(torch.ones(2, 5, 6, 6, dtype=torch.float64)).square().sum().backward()
        for p, q in zip(model.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)

    run_ranks(rank_main, 2)


# ---- training: each rank's part is its own ----


def trained(
    grid: Grid | None,
    wrap: Callable[[torch.optim.Optimizer, nn.Module], Any] = lambda optimizer, _: optimizer,
    before_step: Callable[[nn.Module, Any], object] = lambda model, optimizer: None,
    *,
    bad_step: int | None = None,
    is_bad: bool = False,
) -> nn.Module:
    """Four steps, without a grid of the whole model on all rows.

    With ``bad_step`` under a GradScaler, which leaves that one out.
    """
    rows = slice(None) if grid is None else rows_of(grid.data)

    def layer(num_in: int, num_out: int, split: Split) -> nn.Module:
        if grid is None:
            return nn.Linear(num_in, num_out)
        return ParallelLinear(num_in, num_out, grid.model, split=split)

    model = built(
        lambda: nn.Sequential(
            nn.Linear(5, 6),
            nn.Tanh(),
            layer(6, 7, split="output"),
            nn.Tanh(),
            layer(7, 3, split="input"),
        ).double()
    )
    optimizer = wrap(torch.optim.SGD(model.parameters(), 0.5, momentum=0.9), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=bad_step is not None)
    for step in range(4):
        optimizer.zero_grad()
        x, y = seeded(0, 8, 5, salt=step), seeded(1, 8, 3, salt=step)
        hook = None
        if is_bad and step == bad_step:
            hook = model[2].weight.register_hook(lambda grad: grad * float("nan"))
        scaler.scale(mse_loss(model(x[rows]), y[rows])).backward()
        if hook is not None:
            hook.remove()
        before_step(model, optimizer)
        scaler.step(optimizer)
        scaler.update()
    return model


def rows_of(data: Communicator, num_rows: int = 8) -> slice:
    num = num_rows // data.size
    return slice(num * data.rank, num * (data.rank + 1))


def check_equal(model: nn.Module, expected: nn.Module) -> None:
    whole = gather_state_dict(model)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_copies", [1, 2])
@pytest.mark.parametrize("way", ["max_grad_norm", "of the optimizer", "of links"])
def test_clipping_uses_the_norm_of_the_whole(way: str, num_copies: int) -> None:
    """Plain layers would be clipped by another factor on each rank, and become different."""
    options = {"max_grad_norm": 0.05} if way == "max_grad_norm" else {}
    clips: dict[str, Callable[[nn.Module, Any], object]] = {
        "max_grad_norm": lambda model, optimizer: None,
        "of the optimizer": lambda model, optimizer: optimizer.clip_grad_norm_(0.05),
        "of links": lambda model, optimizer: clip_grad_norm_(model, 0.05),
    }

    def rank_main(comm: Communicator) -> None:
        grid = Grid(comm, data=num_copies, model=2)
        model = trained(
            grid,
            lambda sgd, net: create_multi_node_optimizer(sgd, grid.data, net, **options),
            clips[way],
        )
        whole = trained(
            None, before_step=lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        )
        check_equal(model, whole)
        grid.finalize()

    run_ranks(rank_main, 2 * num_copies)


@pytest.mark.parametrize("num_copies", [0, 1, 2])
def test_scalers_of_all_ranks_leave_the_same_steps_out(num_copies: int) -> None:
    """A gradient that is not finite in one rank's part; 0 copies: a plain optimizer."""

    def rank_main(comm: Communicator) -> None:
        grid = Grid(comm, data=-1, model=2)
        data = grid.data
        model = trained(
            grid,
            lambda sgd, net: create_multi_node_optimizer(sgd, data, net) if num_copies else sgd,
            lambda net, _: None if num_copies else share_nonfinite_(net),
            bad_step=1,
            is_bad=comm.rank == 1,
        )
        check_equal(model, trained(None, bad_step=1, is_bad=True))
        grid.finalize()

    run_ranks(rank_main, 2 * max(num_copies, 1))


def test_a_part_that_is_not_finite_ends_the_step_on_all_ranks() -> None:
    def rank_main(comm: Communicator) -> str:
        grid = Grid(comm, data=1, model=2)
        layer = ParallelLinear(4, 6, grid.model)
        optimizer = create_multi_node_optimizer(
            torch.optim.SGD(layer.parameters(), 0.1), grid.data, layer
        )
        if comm.rank == 1:
            layer.weight.register_hook(lambda grad: grad * float("nan"))
        layer(torch.ones(2, 4)).sum().backward()
        with pytest.raises(NonFiniteGradientError) as caught:
            optimizer.step()
        grid.finalize()
        return str(caught.value)

    first, second = run_ranks(rank_main, 2)
    assert "a part of the model that another rank holds were not finite" in first
    assert "weight" in second


def test_ranks_with_different_parts_do_not_average_or_copy_them() -> None:
    """The parts have the same shape here."""

    def rank_main(comm: Communicator) -> None:
        model = built(lambda: nn.Sequential(nn.Linear(4, 4), ParallelLinear(4, 6, comm)))
        part = model[1].weight.detach().clone()
        parts = "part 0 of 2 along dim 0.*part 1 of 2 along dim 0"
        with pytest.raises(RankMismatchError, match=f"{parts}.*as grid.data of torchmn.Grid"):
            create_multi_node_optimizer(torch.optim.SGD(model.parameters(), 0.1), comm, model)
        kept: list[nn.Module] = [model, copy.deepcopy(model), model.to(torch.float32)]
        kept[1].load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        kept.append(copy.deepcopy(model).to("meta").to_empty(device="cpu"))
        for each in kept:
            with pytest.raises(RankMismatchError, match=parts):
                comm.bcast_data(each)
        assert torch.equal(model[1].weight, part)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_optimizers_that_would_see_a_part_are_refused(kind: type[torch.optim.Optimizer]) -> None:
    def rank_main(comm: Communicator) -> None:
        layer = ParallelLinear(4, 6, comm)
        optimizer = kind(layer.parameters(), lr=0.1)
        layer(torch.ones(2, 4)).sum().backward()
        with pytest.raises(UnsupportedError, match="is a part of a parallel layer"):
            optimizer.step()

    run_ranks(rank_main, 2)


@pytest.mark.parametrize(
    "change", [weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)]
)
def test_what_would_see_a_part_is_refused(change: Callable[[nn.Module], object]) -> None:
    def rank_main(comm: Communicator) -> None:
        layer = ParallelLinear(4, 6, comm, split="input")
        change(layer)
        for call in (lambda: layer(torch.ones(2, 4)), lambda: gather_state_dict(layer)):
            with pytest.raises(UnsupportedError, match="'weight' of a .*part alone.*Remove it"):
                call()

    run_ranks(rank_main, 2)
