"""What `torchmn.cntk.Trainer` must do for any number of ranks and any parts of the minibatches.

A linear model with a squared error, whose gradients are a line of NumPy: the expected parameters
are computed here in one process from whole minibatches, and under block momentum from the parts of
every rank. A contract is called as ``contract(comm, make_trainer)`` on all ranks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import torchmn.cntk as C
from tests.contracts.suites.communicator_contracts import contracts_in, require
from torchmn.comm import Communicator

Array = npt.NDArray[np.float64]
MakeTrainer = Callable[..., C.Trainer]
Contract = Callable[[Communicator, MakeTrainer], None]

INPUTS, OUTPUTS = 3, 2
RATE, TIME_CONSTANT = 0.01, 10.0
SIZES = [12, 7, 1, 4, 9, 2]
"""Samples of the minibatches, some fewer than there are ranks."""


class Linear(nn.Module):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, OUTPUTS).double()
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[0.5, -0.3, 0.2], [0.1, 0.4, -0.6]]))
            self.layer.bias.copy_(torch.tensor([0.1, -0.2]))

    def forward(self, features: Tensor) -> Tensor:
        """Predict ``(samples, 2)``."""
        return self.layer(features)


def minibatch(index: int, size: int) -> dict[str, Tensor]:
    """One with this number of samples."""
    random = np.random.RandomState(index)
    return {
        "features": torch.from_numpy(random.randn(size, INPUTS)),
        "targets": torch.from_numpy(random.randn(size, OUTPUTS)),
    }


def part_of(whole: dict[str, Tensor], index: int, rank: int, size: int) -> dict[str, Tensor]:
    """Each rank has about twice as much as the one before; which is first changes."""
    n = len(whole["targets"])
    cuts = [round(n * (2**r - 1) / (2**size - 1)) for r in range(size + 1)]
    place = (rank + index) % size
    return {name: value[cuts[place] : cuts[place + 1]] for name, value in whole.items()}


def learner(model: nn.Module) -> C.Learner:
    """One whose steps depend on the number of samples in every way."""
    return C.momentum_sgd(
        model.parameters(),
        C.learning_rate_schedule(RATE, C.UnitType.sample),
        C.momentum_as_time_constant_schedule(TIME_CONSTANT),
        l2_regularization_weight=0.01,
        gradient_clipping_threshold_per_sample=0.5,
    )


# ---- by hand ----


class ByHand:
    """One worker that computes in NumPy."""

    def __init__(self) -> None:
        model = Linear()
        self.w = np.hstack(
            [model.layer.weight.detach().numpy(), model.layer.bias.detach().numpy()[:, None]]
        )
        self.smoothed = np.zeros_like(self.w)

    def losses(self, part: dict[str, Tensor]) -> Array:
        """Of each sample."""
        return (self._error(part) ** 2).sum(1)

    def step(self, part: dict[str, Tensor]) -> None:
        """Update the parameters by all samples of the part."""
        x = np.hstack([part["features"].numpy(), np.ones((len(part["features"]), 1))])
        n = len(x)
        gradient = np.clip(2 * self._error(part).T @ x, -0.5 * n, 0.5 * n) + 0.01 * n * self.w
        momentum = math.exp(-n / TIME_CONSTANT)
        self.smoothed = momentum * self.smoothed + (1 - momentum) * RATE * gradient
        self.w = self.w - self.smoothed

    def _error(self, part: dict[str, Tensor]) -> Array:
        x = np.hstack([part["features"].numpy(), np.ones((len(part["features"]), 1))])
        error: Array = x @ self.w.T - part["targets"].numpy()
        return error


def blocks_by_hand(size: int, sizes: Sequence[int], block_size: int) -> Array:
    """Block momentum of CNTK: each worker with its parts, the blocks full to the sample."""
    workers = [ByHand() for _ in range(size)]
    anchor, smoothed = workers[0].w, np.zeros_like(workers[0].w)
    constant = -block_size / math.log(1 - 1 / size) if size > 1 else 0.0
    counts = np.zeros(size)
    for index, n in enumerate(sizes):
        for rank, worker in enumerate(workers):
            part = part_of(minibatch(index, n), index, rank, size)
            if len(part["targets"]):
                worker.step(part)
                counts[rank] += len(part["targets"])
        if counts.sum() < block_size:
            continue
        momentum = math.exp(-counts.sum() / constant) if constant else 0.0
        change = sum(n_i * (anchor - each.w) for n_i, each in zip(counts, workers, strict=True))
        smoothed = momentum * smoothed + (1 - momentum) * size * change / counts.sum()
        anchor = anchor - smoothed - momentum * smoothed
        for worker in workers:
            worker.w, worker.smoothed = anchor, np.zeros_like(anchor)
        counts[:] = 0
    return anchor


# ---- contracts ----


def check_sums_over_all_samples(comm: Communicator, make_trainer: MakeTrainer) -> None:
    """Gradients, rate, momentum, clipping and L2 are those of the whole minibatch."""
    model, expected = Linear(), ByHand()
    trainer = make_trainer(
        model, C.squared_error, C.data_parallel_distributed_learner(learner(model), comm=comm)
    )
    for index, n in enumerate(SIZES):
        whole = minibatch(index, n)
        trainer.train_minibatch(part_of(whole, index, comm.rank, comm.size))
        expected.step(whole)
        _require_close(model, expected.w, f"minibatch {index}")


def check_averages_are_global(comm: Communicator, make_trainer: MakeTrainer) -> None:
    """Loss, metric and counts are those of all ranks' samples, the same on all ranks."""
    model, expected = Linear(), ByHand()
    trainer = make_trainer(
        model,
        (C.squared_error, lambda output, targets: (output - targets).abs().sum(1)),
        C.data_parallel_distributed_learner(learner(model), comm=comm),
    )
    for index, n in enumerate(SIZES):
        whole = minibatch(index, n)
        part = part_of(whole, index, comm.rank, comm.size)
        metric = np.abs(expected._error(whole)).sum(1).mean()
        _require_equal(trainer.test_minibatch(part), metric, "the average of test_minibatch")
        loss = expected.losses(whole).mean()
        trainer.train_minibatch(part)
        expected.step(whole)
        _require_equal(trainer.previous_minibatch_loss_average, loss, "the average loss")
        _require_equal(trainer.previous_minibatch_evaluation_average, metric, "the average metric")
        _require_equal(trainer.previous_minibatch_sample_count, n, "the count of samples")
        _require_equal(trainer.total_number_of_samples_seen, sum(SIZES[: index + 1]), "the total")


def check_ends_together(comm: Communicator, make_trainer: MakeTrainer) -> None:
    """`train_minibatch` is False on all ranks in the same call, when no rank has data."""
    model = Linear()
    trainer = make_trainer(
        model, C.squared_error, C.data_parallel_distributed_learner(learner(model), comm=comm)
    )
    answers = []
    for index in range(comm.size + 2):
        part = minibatch(index + 10 * comm.rank, 3) if index <= comm.rank else {}
        answers.append(trainer.train_minibatch(part))
    found = comm.allgather_obj(answers)
    expected = [index < comm.size for index in range(comm.size + 2)]
    require(all(each == expected for each in found), f"the ranks returned {found}")


def check_blocks(comm: Communicator, make_trainer: MakeTrainer) -> None:
    """Block momentum of uneven parts: local steps, blocks that end by the samples of all ranks."""
    sizes, block_size = [9, 6, 1, 7, 2, 7, 4, 12], 16  # which fill blocks to the sample
    model = Linear()
    trainer = make_trainer(
        model,
        C.squared_error,
        C.block_momentum_distributed_learner(learner(model), block_size, comm=comm),
    )
    for index, n in enumerate(sizes):
        trainer.train_minibatch(part_of(minibatch(index, n), index, comm.rank, comm.size))
    require(not trainer.train_minibatch({}), "the end of the data was not noticed")
    _require_close(model, blocks_by_hand(comm.size, sizes, block_size), "the last block")


TRAINER_CONTRACTS = contracts_in(globals())


def _require_close(model: Linear, expected: Array, when: str) -> None:
    layer: Any = model.layer
    found = torch.hstack([layer.weight, layer.bias[:, None]]).detach().numpy()
    error = np.abs(found - expected).max()
    require(error < 1e-6, f"after {when} the parameters differ by {error:.2g}")


def _require_equal(found: float, expected: float, what: str) -> None:
    require(
        abs(found - expected) < 1e-9 * max(1.0, abs(expected)), f"{what} is {found}, not {expected}"
    )
