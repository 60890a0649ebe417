"""What all ranks must do together: where only some do, all raise and name them."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import on_ranks
from tests.unit.models import (
    batch,
    equal,
    grads,
    local_grads,
    loss_of,
    mean_grads,
    mlp,
    near,
    optimizer_of,
    sgd,
    train,
    values,
    wrap,
)
from torchmn import Auto, create_multi_node_optimizer
from torchmn.comm.codecs import ErrorFeedback, Quantized
from torchmn.errors import (
    CommunicationError,
    PerformanceWarning,
    RankMismatchError,
    UnsupportedError,
    UsageError,
)
from torchmn.exchange.schedules import (
    BlockMomentum,
    DiLoCo,
    DoubleBuffering,
    EveryStep,
    ParameterServer,
    PeriodicAverage,
    Warmup,
)
from torchmn.testing import run_ranks


class TestFlags:
    @pytest.mark.parametrize("schedule", ["every_step", "double_buffering"])
    @on_ranks(2)
    def test_freezing_on_one_rank_is_refused_on_all(self, comm, schedule: str) -> None:
        model, optimizer = wrap(comm, schedule=schedule)
        train(model, optimizer, comm.rank, range(2))
        model[0].requires_grad_(comm.rank != 1)
        with pytest.raises(RankMismatchError, match="rank 1 changed the dtype, device, shape"):
            train(model, optimizer, comm.rank, range(2, 5))

    @on_ranks(2)
    def test_a_state_loaded_on_one_rank_is_refused_on_all(self, comm) -> None:
        model, optimizer = wrap(comm)
        train(model, optimizer, comm.rank, range(2))
        if comm.rank == 0:
            optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(RankMismatchError, match="rank 0 loaded an optimizer state"):
            train(model, optimizer, comm.rank, [2])
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, comm.rank, [3])

    @on_ranks(2)
    def test_one_backward_pass_more_on_one_rank_is_named(self, comm) -> None:
        model, optimizer = wrap(comm)
        train(model, optimizer, comm.rank, range(2))
        optimizer.reducer._num_exchanges.num += comm.rank
        with pytest.raises(CommunicationError, match="at different exchanges of gradients"):
            train(model, optimizer, comm.rank, [2])

    @on_ranks(2)
    def test_the_state_of_rank_0_is_that_of_all(self, comm):
        model = mlp()
        inner = sgd(model)
        if comm.rank == 0:
            momenta = {
                index: {"momentum_buffer": torch.full_like(p, 0.5)}
                for index, p in enumerate(model.parameters())
            }
            groups = inner.state_dict()["param_groups"]
            inner.load_state_dict({"state": momenta, "param_groups": groups})
        optimizer = create_multi_node_optimizer(inner, comm, model)
        held = [optimizer.state[p]["momentum_buffer"].unique() for p in model.parameters()]
        assert [h.tolist() for h in held] == [[0.5]] * 4
        train(model, optimizer, comm.rank, range(2))
        return values(model)


class TestLayers:
    @pytest.mark.parametrize(
        ("layer", "text"),
        [
            (lambda rank: nn.Dropout(0.25 * rank), r"Dropout(p=0.0, inplace=False)"),
            (lambda rank: [nn.ReLU(), nn.GELU()][rank], r"ReLU(), rank 1 has GELU(approximate="),
        ],
    )
    @on_ranks(2)
    def test_other_options_of_a_layer_are_refused(self, comm, layer, text: str) -> None:
        """A search whose trials are drawn from the rank's own random numbers."""
        model = nn.Sequential(mlp(), layer(comm.rank))
        with pytest.raises(RankMismatchError, match=re.escape("'1': rank 0 has " + text)):
            create_multi_node_optimizer(sgd(model), comm, model)

    @on_ranks(2)
    def test_layers_that_one_rank_has_alone_may_be_used(self, comm) -> None:
        model = nn.Sequential(mlp(), *[nn.Identity()] * comm.rank)
        optimizer = create_multi_node_optimizer(sgd(model), comm, model)
        train(model, optimizer, comm.rank, range(2))


ARGUMENTS = {
    "'schedule.block_size': rank 0 has 16, rank 1 has 32": (
        lambda rank: {"schedule": PeriodicAverage(16 * (rank + 1))}
    ),
    "'schedule.num_fragments': rank 0 has 1, rank 1 has 2": (
        lambda rank: {"schedule": DiLoCo(16, num_fragments=rank + 1)}
    ),
    "'lr of group 0': rank 0 has 0.5, rank 1 has 0.75": (
        lambda rank: {"schedule": DiLoCo(16, outer=partial(torch.optim.SGD, lr=0.5 + rank / 4))}
    ),
    "'schedule.eager': rank 0 has False, rank 1 has True": (
        lambda rank: {"schedule": DoubleBuffering(eager=rank == 1)}
    ),
    "'schedule.schedule.overlap_steps': rank 0 has 0, rank 1 has 1": (
        lambda rank: {"schedule": Warmup(8, BlockMomentum(16, overlap_steps=rank))}
    ),
    "'schedule.max_staleness': rank 0 has 0, rank 1 has 1": (
        lambda rank: {"schedule": ParameterServer(max_staleness=rank)}
    ),
    "'codec.codec.block_length': rank 0 has 512, rank 1 has 544": (
        lambda rank: {"codec": ErrorFeedback(Quantized(8, block_length=512 + 32 * rank))}
    ),
    "'schedule': rank 0 has auto among every_step, float32, rank 1 has auto among": (
        lambda rank: {"codec": Auto(lossy=rank == 1)}
    ),
}


@pytest.mark.parametrize("message", ARGUMENTS)
@on_ranks(2)
def test_different_schedules_and_codecs_are_refused(comm, message: str) -> None:
    """Ranks whose blocks end at different steps ended with different parameters."""
    with pytest.raises(RankMismatchError, match=message):
        wrap(comm, **ARGUMENTS[message](comm.rank))


class TestUnsynced:
    def test_a_pass_under_no_sync_after_the_exchange_is_exchanged_in_step(self) -> None:
        def rank_main(comm):
            model, optimizer = wrap(comm)
            expected = [
                a + b
                for a, b in zip(
                    mean_grads(model, range(2), 0), mean_grads(model, range(2), 1), strict=True
                )
            ]
            loss_of(model, batch(comm.rank, 0)).backward()
            with optimizer.no_sync():
                loss_of(model, batch(comm.rank, 1)).backward()
            optimizer.step()
            assert near(grads(model), expected)
            return values(model)

        with pytest.warns(PerformanceWarning, match="More than one backward"):
            first, second = run_ranks(rank_main, 2)
        assert equal(first, second)

    @on_ranks(2)
    def test_double_buffering_refuses_it(self, comm) -> None:
        model, optimizer = wrap(comm, schedule="double_buffering")
        train(model, optimizer, comm.rank, range(2))
        loss_of(model, batch(comm.rank, 0)).backward()
        with optimizer.no_sync():
            loss_of(model, batch(comm.rank, 1)).backward()
        with pytest.raises(UnsupportedError, match="must be the last one"):
            optimizer.step()

    @on_ranks(2)
    def test_what_is_frozen_after_a_pass_under_no_sync_is_exchanged(self, comm) -> None:
        model, optimizer = wrap(comm)
        first, both = mean_grads(model, range(2), 0), mean_grads(model, range(2), 1)
        with optimizer.no_sync():
            loss_of(model, batch(comm.rank, 0)).backward()
        model[0].requires_grad_(False)
        loss_of(model, batch(comm.rank, 1)).backward()
        assert near(grads(model)[:2], first[:2])
        total = [a + b for a, b in zip(first[2:], both[2:], strict=True)]
        assert near(grads(model)[2:], total)


class TestOneOptimizerPerParameter:
    @on_ranks(2, name="hierarchical")
    def test_a_newer_one_replaces_the_older_which_then_raises(self, comm) -> None:
        model, older = wrap(comm)
        train(model, older, comm.rank, range(2))
        adam = torch.optim.Adam(model.parameters(), 0.01)
        newer = create_multi_node_optimizer(adam, comm, model)
        newer.zero_grad()
        loss_of(model, batch(comm.rank, 2)).backward()
        assert near(grads(model), mean_grads(model, range(2), 2))
        newer.step()
        with pytest.raises(UsageError, match=r"SGD .*gave its parameters to .* Adam"):
            older.step()

    def test_an_exception_while_it_is_made_leaves_no_hooks(self) -> None:
        class Fails(EveryStep):
            def attach(self, reducer, inner, models) -> None:
                raise RuntimeError("no")

        def rank_main(comm):
            model = mlp()
            with pytest.raises(RuntimeError, match="no"):
                optimizer_of(comm, model, schedule=Fails())
            loss_of(model, batch(comm.rank, 0)).backward()
            assert equal(grads(model), local_grads(model, batch(comm.rank, 0)))
            optimizer = optimizer_of(comm, model)
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, 0)).backward()
            assert near(grads(model), mean_grads(model, range(2), 0))

        run_ranks(rank_main, 2)

    @on_ranks(2)
    def test_a_schedule_object_has_one_optimizer(self, comm) -> None:
        schedule = EveryStep()
        model = mlp()
        optimizer_of(comm, model, schedule=schedule)
        with pytest.raises(UsageError, match=r"EveryStep object belongs to another optimizer"):
            optimizer_of(comm, model, schedule=schedule)

    @on_ranks(1)
    def test_wrappers_are_not_wrapped(self, comm) -> None:
        model, optimizer = wrap(comm)
        with pytest.raises(UsageError, match=re.escape("optimizer.inner")):
            create_multi_node_optimizer(optimizer, comm, model)
        wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
        nn.Module.__init__(wrapped)
        with pytest.raises(UnsupportedError, match=r"model\.module"):
            create_multi_node_optimizer(sgd(model), comm, wrapped)
