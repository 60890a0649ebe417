"""One global batch, divided among any number of ranks and passes."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.unit.data.test_global_sampler import Placement
from torchmn import create_multi_node_optimizer, scatter_loader
from torchmn.comm import Communicator
from torchmn.data.scatter import shard_bounds
from torchmn.errors import RankMismatchError, UsageError
from torchmn.nn import convert_batch_norm
from torchmn.testing import run_ranks
from torchmn.train.large_batch import BatchGrowth, GlobalBatch


def batches(size: int, *args: object, **options: object) -> list[GlobalBatch]:
    return [GlobalBatch(*args, comm=Placement(rank, size), **options) for rank in range(size)]


def of_ones(comm: Any, model: nn.Module, rate: float = 1.0, **options: Any) -> Any:
    """A model whose parameters are ones, and its optimizer."""
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    sgd = torch.optim.SGD(model.parameters(), rate)
    return model, create_multi_node_optimizer(sgd, comm, model, **options)


@given(
    global_batch=st.integers(1, 300),
    size=st.integers(1, 7),
    local_batch=st.none() | st.integers(1, 80),
)
def test_every_sample_is_in_one_pass_of_one_rank(
    global_batch: int, size: int, local_batch: int | None
) -> None:
    ranks = batches(size, global_batch, local_batch)
    assert sum(batch.share for batch in ranks) == global_batch
    assert max(b.share for b in ranks) - min(b.share for b in ranks) <= 1
    assert len({(b.local_batch, b.accumulation) for b in ranks}) == 1
    for batch in ranks:
        assert local_batch is None or batch.local_batch <= local_batch
        passes = list(batch.micro_batches(torch.arange(batch.share)))
        assert torch.cat([part for part, _ in passes] or [torch.tensor([])]).tolist() == list(
            range(batch.share)
        )
        assert all(len(part) <= batch.local_batch for part, _ in passes)
        assert len(passes) == min(batch.accumulation, batch.share)
        assert len(passes) == batch.accumulation or batch.local_batch == 1 or not batch.share
        assert sum(share for _, share in passes) == pytest.approx(1 if batch.share else 0)


def test_wrong_numbers_are_refused() -> None:
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(UsageError, match="global_batch"):
            batches(1, wrong)
    with pytest.raises(UsageError, match="local_batch=0"):
        batches(1, 8, 0)


def test_ranks_must_agree() -> None:
    def make(comm: Communicator) -> None:
        with pytest.raises(RankMismatchError, match="rank [01]"):
            GlobalBatch(8, comm=comm, local_batch=2 + comm.rank)

    run_ranks(make, 2)


def test_one_sampler_for_a_batch() -> None:
    (batch,) = batches(1, 4)
    batch.sampler(10)
    with pytest.raises(UsageError, match="has a sampler already"):
        batch.sampler(10)
    with pytest.raises(UsageError, match=r"Leave batch\.count\(\) out"):
        batch.count()


def test_structures_are_cut_and_different_lengths_are_refused() -> None:
    (batch,) = batches(1, 5, 2)
    data = {"x": torch.arange(10.0).view(5, 2), "y": [torch.arange(5)]}
    parts = [part for part, _ in batch.micro_batches(data)]
    assert [len(part["x"]) for part in parts] == [2, 2, 1]
    assert torch.cat([part["y"][0] for part in parts]).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UsageError, match=r"\[4, 5\] in dim 0"):
        list(batch.micro_batches((torch.zeros(5), torch.zeros(4))))


def train_passes(
    comm: Communicator,
    batch: tuple[int, int | None],
    length: int,
    converted: bool,
    **options: bool,
) -> list[int]:
    """How many passes this rank makes in each step, ``converted``: with batch normalization."""
    norm = convert_batch_norm(nn.BatchNorm1d(3), comm) if converted else nn.Identity()
    model = nn.Sequential(nn.Linear(4, 3), norm)
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), 0.1), comm, model)
    whole = GlobalBatch(*batch, comm=comm)
    announced, passes = whole.local_batch, []
    for part in whole.sampler(length, **options):
        optimizer.zero_grad()
        passes.append(0)
        for x, share in whole.micro_batches(torch.randn(len(part), 4), optimizer):
            assert len(x) <= announced
            (model(torch.cat([x, x + 1])).square().mean() * share).backward()
            passes[-1] += 1
        optimizer.step()
    return passes


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("converted", [True, False])
@pytest.mark.parametrize(
    ("global_batch", "local_batch", "length"),
    [(7, None, 11), (7, 2, 14), (8, 2, 19), (5, 3, 9)],
)
def test_passes_with_batch_normalization_over_all_ranks(
    global_batch: int, local_batch: int | None, length: int, converted: bool, size: int,
) -> None:  # fmt: skip
    """Uneven shares and short batches: a rank with one pass less would let the others wait."""
    batch = (global_batch, local_batch)
    first, *others = run_ranks(lambda comm: train_passes(comm, batch, length, converted), size)
    assert all(each == first for each in others)


@pytest.mark.parametrize(
    ("global_batch", "local_batch", "length", "message"),
    [
        (7, 1, 7, r"batch of 7 samples makes 3 passes .* 3 sample.* and 2 on those with 2"),
        (6, 2, 8, r"batch of 2 samples makes 1 pass .* 1 sample.* and 0 on those with 0"),
    ],
)
def test_passes_that_would_wait_for_other_ranks_are_refused_on_all(
    global_batch: int, local_batch: int, length: int, message: str
) -> None:
    """The announced memory of a pass counts more than equal numbers of passes."""
    batch = (global_batch, local_batch)

    def refused(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=rf"{message}, and '1', a MultiNodeBatchNorm1d"):
            train_passes(comm, batch, length, converted=True)

    run_ranks(refused, 3)
    passes = run_ranks(lambda comm: train_passes(comm, batch, length, converted=False)[-1], 3)
    assert passes[0] == passes[2] + 1


def test_pad_last_makes_as_many_passes_on_all_ranks() -> None:
    def train(comm: Communicator) -> list[int]:
        return train_passes(comm, (6, 1), 8, converted=True, pad_last=True)

    assert run_ranks(train, 3) == [[2, 1]] * 3


def test_a_growing_batch_keeps_the_memory_of_a_pass() -> None:
    ranks = batches(3, 7, local_batch=2, growth=BatchGrowth([7], 10, unit="samples"))
    assert [(each.accumulation, each.local_batch) for each in ranks] == [(2, 2)] * 3
    for each in ranks:
        each.count()
    assert [(each.share, each.accumulation, each.local_batch) for each in ranks] == [
        (24, 12, 2),
        (23, 12, 2),
        (23, 12, 2),
    ]


def test_an_exception_in_a_pass_leaves_the_optimizer_exchanging() -> None:
    def train(comm: Communicator) -> float:
        model, optimizer = of_ones(comm, nn.Linear(1, 1, bias=False))
        batch = GlobalBatch(8, comm=comm, local_batch=2)
        x = torch.full((4, 1), float(comm.rank))
        try:
            for _ in batch.micro_batches(x, optimizer):
                raise KeyError
        except KeyError:
            pass
        model(x).mean().backward()
        assert model.weight.grad is not None
        return model.weight.grad.item()

    assert run_ranks(train, 2) == [0.5, 0.5]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_rank_without_samples_clips_as_the_others(size: int) -> None:
    """The means are there before step(): what clips there on one rank must do so on all."""
    samples = torch.randn(1, 3, generator=torch.Generator().manual_seed(0))

    def rank_main(comm: Communicator) -> torch.Tensor:
        model, optimizer = of_ones(comm, nn.Linear(3, 2), 0.1)
        batch = GlobalBatch(8, local_batch=2, comm=comm)
        optimizer.zero_grad()
        for x, share in batch.micro_batches(samples if comm.rank == 0 else samples[:0], optimizer):
            (model(x).square().mean() * share).backward()
        norm = nn.utils.clip_grad_norm_(model.weight, 0.1)
        optimizer.step()
        return torch.cat([norm.reshape(1), model.weight.detach().flatten()])

    (alone,) = run_ranks(rank_main, 1)
    assert alone[0] > 0.1
    for found in run_ranks(rank_main, size):
        assert torch.allclose(found, alone)


@pytest.mark.parametrize("has_loader", [True, False])
@pytest.mark.parametrize(
    ("sizes", "is_refused"),
    [([8, 8], False), ([8, 4, 8], False), ([7, 7], False), ([7, 6], True), ([8, 1], True)],
)
def test_batches_accumulated_under_no_sync_are_exact_or_refused(
    sizes: list[int], is_refused: bool, has_loader: bool
) -> None:
    """One weight of a rank is right only for parts that are in proportion on all ranks."""
    x = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def rank_main(comm: Communicator) -> torch.Tensor:
        model, optimizer = of_ones(comm, nn.Linear(3, 1).double(), 0.1)
        if has_loader:
            scatter_loader(DataLoader(TensorDataset(x)), comm)
        batch = GlobalBatch(8, local_batch=2, comm=comm)

        def accumulate(whole: torch.Tensor) -> None:
            own = whole[
                slice(*shard_bounds(len(whole), comm.size, comm.rank, force_equal_length=False))
            ]
            for part, share in batch.micro_batches(own, optimizer):
                (model(part).square().mean() * share).backward()

        with optimizer.no_sync():
            accumulate(x[:5])  # of a batch that is left out
        optimizer.zero_grad()
        *first, last = x.split(sizes)
        with optimizer.no_sync():
            for whole in first:
                accumulate(whole)
        if is_refused and comm.size > 1:
            with pytest.raises(UsageError, match=r"not in proportion on all ranks: rank 0 4 and"):
                accumulate(last)
            optimizer.zero_grad()
        accumulate(last)
        optimizer.step()
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    (alone,) = run_ranks(rank_main, 1)
    for found in run_ranks(rank_main, 2):
        assert is_refused or torch.allclose(found, alone, rtol=1e-12, atol=1e-12)


def test_passes_of_a_training_need_the_optimizer() -> None:
    def rank_main(comm: Communicator) -> None:
        model = nn.Linear(3, 2)
        create_multi_node_optimizer(torch.optim.SGD(model.parameters(), 0.1), comm, model)
        batch = GlobalBatch(4, comm=comm)
        with torch.no_grad():
            assert len([*batch.micro_batches(torch.ones(2, 3))]) == 1
        with pytest.raises(UsageError, match=r"micro_batches\(samples, optimizer\)"):
            [*batch.micro_batches(torch.ones(2, 3))]

    run_ranks(rank_main, 2)


def test_reduction_sum_adds_all_samples() -> None:
    def train(comm: Communicator) -> float:
        model, optimizer = of_ones(comm, nn.Linear(1, 1, bias=False), reduction="sum")
        batch = GlobalBatch(7, comm=comm, local_batch=2)
        x = torch.arange(7.0)[:, None].tensor_split(comm.size)[comm.rank]
        for part, share in batch.micro_batches(x, optimizer):
            (model(part).sum() * share).backward()
        assert model.weight.grad is not None
        return model.weight.grad.item()

    assert run_ranks(train, 2) == [21.0, 21.0]
