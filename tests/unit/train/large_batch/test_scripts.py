"""Ordinary scripts with large batches give on two ranks what they give in one process.

The comparison is plain torch on whole batches without this package, or one rank where the script is
about what plain torch has not.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from tests.unit.data.test_global_sampler import Placement
from torchmn.comm import Communicator
from torchmn.testing import run_ranks
from torchmn.train.large_batch import LAMB, BatchGrowth, Cosine, GlobalBatch, GradualWarmup

NUM_SAMPLES, NUM_EPOCHS, BATCH = 45, 3, 14
Parameters = list[Tensor]


def data() -> TensorDataset:
    x = torch.randn(NUM_SAMPLES, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1))


def net() -> nn.Sequential:
    return filled(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2)))


def filled(model: nn.Sequential) -> nn.Sequential:
    """With the same values on all ranks, which are threads and share torch's generator."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.double().parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
    return model


def values(model: nn.Module) -> Parameters:
    return [parameter.detach().clone() for parameter in model.parameters()]


def whole_batches(num_epochs: int = NUM_EPOCHS) -> Iterator[tuple[int, Tensor, Tensor]]:
    """What one process without this package loads: the samples before, and a batch."""
    order = torchmn.GlobalSampler(NUM_SAMPLES, Placement(0, 1), BATCH)
    x, y = data().tensors
    for epoch in range(num_epochs):
        for begin in range(0, NUM_SAMPLES, BATCH):
            rows = torch.as_tensor(order.order(epoch)[begin : begin + BATCH])
            yield epoch * NUM_SAMPLES + begin, x[rows], y[rows]


def assert_near(ranks: list[Parameters], wanted: Parameters, tolerance: float = 1e-12) -> None:
    for found in ranks:
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).abs().max() < tolerance
    for found in ranks[1:]:
        assert all(a.equal(b) for a, b in zip(found, ranks[0], strict=True))


def loader_of(batch: GlobalBatch, **options: Any) -> DataLoader[Any]:
    return DataLoader(data(), batch_sampler=batch.sampler(data()), **options)


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Of plain torch, on a whole batch."""
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: GlobalBatch, loader: DataLoader[Any]
) -> Iterator[None]:
    """One epoch as scripts write it; yields after each step."""
    for samples in loader:
        optimizer.zero_grad()
        for (x, y), share in batch.micro_batches(samples, optimizer):
            (mse_loss(model(x), y) * share).backward()
        optimizer.step()
        yield


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: GlobalBatch, loader: DataLoader[Any]
) -> Parameters:
    """The parameters after all epochs."""
    for _ in range(NUM_EPOCHS):
        list(steps(model, optimizer, batch, loader))
    return values(model)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("weight", ["rank", "samples"])
def test_accumulation_with_an_uneven_rest(size: int, weight: Any) -> None:
    def script(comm: Communicator) -> Parameters:
        model = net()
        sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, weight=weight)
        batch = GlobalBatch(BATCH, comm=comm, local_batch=3)
        return trained(model, optimizer, batch, loader_of(batch))

    model = net()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _, x, y in whole_batches():
        whole_step(model, sgd, x, y)
    assert_near(run_ranks(script, size), values(model))


def test_accumulation_exchanges_once_per_step() -> None:
    def script(comm: Communicator) -> int:
        model = net()
        optimizer = torchmn.create_multi_node_optimizer(
            torch.optim.SGD(model.parameters(), 0.1), comm, model
        )
        batch = GlobalBatch(12, local_batch=2, comm=comm)
        x, y = (t[:6] for t in data().tensors)
        before = optimizer.reducer._num_exchanges.num
        for (u, v), share in batch.micro_batches((x, y), optimizer):
            (mse_loss(model(u), v) * share).backward()
        return optimizer.reducer._num_exchanges.num - before

    assert run_ranks(script, 2) == [1, 1]


@pytest.mark.parametrize("growth", [None, BatchGrowth([0.5, 1.2], 1.5)])
def test_stopped_in_the_middle_and_resumed_on_other_ranks(
    tmp_path: Path, growth: BatchGrowth | None
) -> None:
    def script(comm: Communicator, name: str, num_steps: int) -> tuple[int, Parameters]:
        model = net()
        optimizer = torchmn.create_multi_node_optimizer(LAMB(model.parameters(), 0.05), comm, model)
        batch = GlobalBatch(BATCH, comm=comm, local_batch=3, growth=growth)
        loader = loader_of(batch)
        schedule = Cosine(GradualWarmup(optimizer, batch, 1), batch, NUM_EPOCHS)
        state = {
            "model": model,
            "optimizer": optimizer,
            "sampler": loader.batch_sampler,
            "schedule": schedule,
        }
        checkpointer = torchmn.create_multi_node_checkpointer(comm, tmp_path, name)
        step = checkpointer.resume(state)
        while batch.samples_seen < NUM_EPOCHS * NUM_SAMPLES and step < num_steps:
            for _ in steps(model, optimizer, batch, loader):
                schedule.step()
                step += 1
                checkpointer.save(step, state)
                if step == num_steps:
                    break
        checkpointer.finish()
        return step, values(model)

    (wanted,) = run_ranks(lambda comm: script(comm, "whole", 10**6), 1)
    run_ranks(lambda comm: script(comm, "parts", 3), 3)
    run_ranks(lambda comm: script(comm, "parts", 5), 1)
    found = run_ranks(lambda comm: script(comm, "parts", 10**6), 2)
    assert [steps for steps, _ in found] == [wanted[0]] * 2
    assert_near([params for _, params in found], wanted[1])
