"""A growing batch loses and repeats no sample, also on another number of ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from torchmn.comm.training_start import training_steps
from torchmn.data import scatter_loader
from torchmn.errors import UsageError
from torchmn.train.large_batch import BatchGrowth, GlobalBatch
from torchmn.train.large_batch.batch_growth import GrowingSampler

from .test_global_batch import batches


def samplers(size: int, length: int, batch: int, growth: BatchGrowth, **options: object) -> list:
    ranks = batches(size, batch, growth=growth)
    return [(each, each.sampler(length, seed=3, **options)) for each in ranks]


def one_pass(ranks: list[tuple[GlobalBatch, GrowingSampler]]) -> list[list[int]]:
    parts = zip(*(list(sampler) for _, sampler in ranks), strict=True)
    return [[index for part in step for index in part] for step in parts]


def test_sizes_of_steps() -> None:
    growth = BatchGrowth([1, 1.5, 3], 2, max_batch=60)
    ranks = samplers(2, 40, 10, growth)
    sizes = []
    for _ in range(4):
        assert len(ranks[0][1]) == len(steps := one_pass(ranks))
        sizes.append([len(step) for step in steps])
    assert sizes == [[10] * 4, [20, 20], [40], [40]]
    assert [b.global_batch for b, _ in ranks] == [60, 60]
    assert [b.share for b, _ in ranks] == [30, 30]
    assert [(b.accumulation, b.local_batch) for b, _ in ranks] == [(6, 5)] * 2  # 5 fitted


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 60),
    batch=st.integers(1, 20),
    milestones=st.lists(st.floats(0.1, 4), min_size=1, max_size=4, unique=True).map(sorted),
    factor=st.floats(1.1, 4),
    sizes=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    stops=st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_stopped_and_resumed_anywhere_on_any_ranks(
    length: int,
    batch: int,
    milestones: list[float],
    factor: float,
    sizes: list[int],
    stops: list[int],
) -> None:
    growth = BatchGrowth(milestones, factor)
    whole_ranks = samplers(1, length, batch, growth)
    whole = [step for _ in range(4) for step in one_pass(whole_ranks)]
    state = None
    found: list[list[int]] = []
    for size, stop in zip(sizes, stops, strict=True):
        ranks = samplers(size, length, batch, growth)
        for _, sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
        passes = [iter(sampler) for _, sampler in ranks]
        for _ in range(stop):
            parts = [next(each, None) for each in passes]
            if parts[0] is None:
                break
            step = [index for part in parts for index in part]
            assert ranks[0][1].received_batch == len(step)
            found.append(step)
        for _, sampler in ranks:  # a loop that has taken a step per batch
            training_steps(sampler._comm).count = 99
        (state,) = {tuple(sampler.state_dict().items()) for _, sampler in ranks}
        state = dict(state)
    assert found == whole[: len(found)]


def test_with_prefetching_workers_the_batch_in_hand_is_known() -> None:
    (batch,) = batches(1, 4, 2, growth=BatchGrowth([8], 2, unit="samples"))
    sampler = batch.sampler(24, shuffle=False)
    loader = DataLoader(TensorDataset(torch.arange(24)), batch_sampler=sampler, num_workers=1)
    (x,) = next(iter(loader))
    with pytest.raises(UsageError, match="have prefetched batches .*scatter_loader"):
        next(batch.micro_batches(x))
    sampler.set_epoch(1)
    sampler.set_epoch(0)
    seen, samples, passes = [], [], []
    for (x,) in scatter_loader(loader, batch.comm):
        seen.append(sampler.received_batch)
        samples.append(batch.samples_seen)
        passes.append(len(list(batch.micro_batches(x))))
    assert seen == [4, 4, 8, 8]
    assert samples == [4, 8, 16, 24]
    assert passes == [2, 2, 4, 4]


def test_drop_last_and_pad_last() -> None:
    growth = BatchGrowth([20], 2, unit="samples")
    steps = one_pass(samplers(3, 37, 10, growth, drop_last=True))
    assert [len(step) for step in steps] == [10, 10]
    steps = one_pass(samplers(3, 41, 10, growth, pad_last=True))
    assert [len(step) for step in steps] == [10, 10, 20, 3]
    with pytest.raises(UsageError, match="grows to 80 samples"):
        samplers(1, 37, 10, BatchGrowth([1, 2, 3]), drop_last=True)


def test_without_a_sampler_the_batch_grows_by_what_is_counted() -> None:
    (batch,) = batches(1, 10, growth=BatchGrowth([25], 2, unit="samples"))
    sizes = []
    for _ in range(5):
        sizes.append(batch.global_batch)
        batch.count()
    assert sizes == [10, 10, 10, 20, 20]
    (batch,) = batches(1, 10, growth=BatchGrowth([2]))
    batch.count()
    with pytest.raises(UsageError, match="counts epochs"):
        batch.global_batch  # noqa: B018


def test_wrong_arguments_are_refused() -> None:
    for factor in (1, 0.5, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="factor"):
            BatchGrowth([1], factor)
    with pytest.raises(UsageError, match="increasing"):
        BatchGrowth([0, 1])
    for most in (0, 10.5, 8.0, True, "9"):
        with pytest.raises(UsageError, match="max_batch=.*whole number"):
            BatchGrowth([1], max_batch=most)
