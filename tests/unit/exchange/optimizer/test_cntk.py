"""CNTK's learners by their names."""

from __future__ import annotations

import pytest
import torch

from tests.unit.exchange.schedules.local_updates.runs import momentum, sgd, train
from tests.unit.models import batch, equal, local_grads, mlp, near, values
from torchmn.errors import UsageError
from torchmn.exchange.optimizer import (
    block_momentum_distributed_learner,
    data_parallel_distributed_learner,
)
from torchmn.exchange.schedules import BlockMomentum, Warmup
from torchmn.testing import run_ranks


@pytest.mark.parametrize("bits", [32, 16, 8, 4, 2, 1])
def test_data_parallel_in_all_numbers_of_bits(bits: int) -> None:
    def rank_main(comm):
        model = mlp(dtype=torch.float32)
        learner = data_parallel_distributed_learner(
            momentum(model), num_quantization_bits=bits, comm=comm, model=model
        )
        for step in range(2):
            learner.zero_grad()
            model(batch(comm.rank, step, dtype=torch.float32)).pow(2).mean().backward()
            learner.step()
        codec = learner.reducer.codec
        assert int(codec.bits if codec is not None else 32) == bits
        return values(model)

    assert equal(*run_ranks(rank_main, 2))


def test_gradients_are_means_over_samples() -> None:
    """CNTK: sum of all samples' gradients, divided by their number if lr is per minibatch."""

    def rank_main(comm):
        model = mlp()
        learner = data_parallel_distributed_learner(sgd(model), comm=comm, model=model)
        together = torch.cat([batch(rank, 0, 3 + rank) for rank in range(2)])
        expected = local_grads(mlp(), together)
        train(model, learner, comm.rank, 0, 3 + comm.rank)
        moved = [(b - a) / 0.1 for a, b in zip(values(model), values(mlp()), strict=True)]
        assert near(moved, expected, 1e-11)

    run_ranks(rank_main, 2)


def test_quantized_after_a_number_of_samples() -> None:
    def rank_main(comm):
        model = mlp()
        learner = data_parallel_distributed_learner(sgd(model), 12, 1, comm=comm, model=model)
        names = []
        for step in range(3):
            assert (learner.reducer.codec is None) is (step < 2)
            train(model, learner, comm.rank, step)
            names = {entry.name for entry in comm.flight_recorder.entries()}
        assert "scatter_1bit+residual" in names
        return values(model)

    assert equal(*run_ranks(rank_main, 2))


@pytest.mark.parametrize("bits", [3, 0, 64, "1bit"])
def test_other_numbers_of_bits(bits: object) -> None:
    def rank_main(comm):
        model = mlp()
        with pytest.raises(UsageError, match="must be one of 32, 16, 8, 4, 2, 1"):
            data_parallel_distributed_learner(
                sgd(model), num_quantization_bits=bits, comm=comm, model=model
            )

    run_ranks(rank_main, 1)


def test_block_momentum_in_cntks_spelling() -> None:
    def rank_main(comm):
        model = mlp()
        learner = block_momentum_distributed_learner(
            sgd(model),
            16,
            block_momentum_as_time_constant=40,
            use_nestrov_momentum=False,
            reset_sgd_momentum_after_aggregation=False,
            block_learning_rate=0.5,
            distributed_after=8,
            comm=comm,
            model=model,
        )
        assert isinstance(learner.schedule, Warmup)
        schedule = learner.schedule.schedule
        assert isinstance(schedule, BlockMomentum)
        assert (schedule.block_size, schedule.time_constant) == (16, 40)
        assert not schedule.nesterov
        assert not schedule.resets_momentum
        assert (schedule.block_learning_rate, learner.schedule.warmup_samples) == (0.5, 8)
        for step in range(4):
            train(model, learner, comm.rank, step)
        learner.flush()
        return values(model)

    assert equal(*run_ranks(rank_main, 2))
