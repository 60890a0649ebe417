"""scatter_index and scatter_dataset: the two rules, what travels, and how errors reach all."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from tests.limits import limit
from tests.mpi_pool import MpiPool
from torchmn.data import scatter_dataset, scatter_index, shard_bounds
from torchmn.data.received_samples import ReceivedSamples
from torchmn.errors import DataError, RankMismatchError, TorchmnError, UnsupportedError, UsageError
from torchmn.testing import run_ranks

SIZES = range(1, 9)
LENGTHS = range(51)


def images(length: int = 21) -> TensorDataset:
    """Images (2, 3) and labels whose value is the index."""
    x = torch.arange(length * 6, dtype=torch.float32).view(length, 2, 3)
    return TensorDataset(x, torch.arange(length))


class Readings:
    """Counts how often each sample was read."""

    def __init__(self, length: int) -> None:
        self.num_reads = [0] * length

    def __len__(self) -> int:
        return len(self.num_reads)

    def __getitem__(self, index: int) -> int:
        self.num_reads[index] += 1
        return index


def assert_refused(function, kind, *texts, size=2, **options) -> None:
    """All ranks raise the same error."""

    def rank_main(comm):
        try:
            return function(comm)
        except TorchmnError as error:
            return error

    errors = run_ranks(rank_main, size, **options)
    assert all(type(error) is kind for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    for text in texts:
        assert text in str(errors[0])


def process_main(comm):
    part = scatter_dataset(images(5) if comm.rank == 0 else None, comm)
    return [int(label) for _, label in part]


# ---- the rules


@pytest.mark.parametrize("size", SIZES)
def test_equal_rule(size: int) -> None:
    for length in LENGTHS:
        shards = [range(*shard_bounds(length, size, rank)) for rank in range(size)]
        assert {len(shard) for shard in shards} == {math.ceil(length / size)}
        assert [shard.start for shard in shards] == [length * rank // size for rank in range(size)]
        assert max(shard.stop for shard in shards) == length
        assert set().union(*shards) == set(range(length))
        for left, right in zip(shards, shards[1:], strict=False):
            assert len(set(left) & set(right)) <= 1


@pytest.mark.parametrize("size", SIZES)
def test_exact_rule(size: int) -> None:
    for length in LENGTHS:
        shards = [
            range(*shard_bounds(length, size, rank, force_equal_length=False))
            for rank in range(size)
        ]
        assert [i for shard in shards for i in shard] == list(range(length))
        share, rest = divmod(length, size)
        assert [len(shard) for shard in shards] == [share + 1] * rest + [share] * (size - rest)


# ---- scatter_index


@pytest.mark.parametrize("force_equal_length", [True, False])
@pytest.mark.parametrize(("size", "root"), [(1, 0), (2, 0), (3, 2), (4, 1)])
def test_index_is_the_root_s(size: int, root: int, force_equal_length: bool) -> None:
    def indices(comm):
        own = 10 if comm.rank == root else 99
        return scatter_index(own, comm, root, force_equal_length=force_equal_length)

    assert run_ranks(indices, size) == [
        shard_bounds(10, size, rank, force_equal_length=force_equal_length) for rank in range(size)
    ]


@pytest.mark.parametrize(("length", "seen"), [(-3, "-3"), ("ten", "'ten'")])
def test_index_refuses_on_all_ranks(length: object, seen: str) -> None:
    def indices(comm):
        return scatter_index(length if comm.rank == 1 else 5, comm)

    assert_refused(indices, UsageError, "Rank 1", seen, size=3)


@pytest.mark.parametrize("root", [-1, 2])
def test_root_outside_the_world(root: int) -> None:
    assert_refused(lambda comm: scatter_index(5, comm, root), UsageError, "root=", "0 to 1")


def test_ranks_with_different_roots_are_refused() -> None:
    assert_refused(lambda comm: scatter_index(5, comm, comm.rank), RankMismatchError, "root=[0, 1]")


# ---- every rank has the data set


@pytest.mark.parametrize("force_equal_length", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("length", "size"), [(0, 2), (2, 3), (20, 4), (14, 3), (5, 1)])
def test_own_data_sets(length: int, size: int, shuffle: bool, force_equal_length: bool) -> None:
    def shard(comm):
        own = list(range(length))
        part = scatter_dataset(
            own, comm, shuffle=shuffle, seed=7, force_equal_length=force_equal_length
        )
        assert part.dataset is own
        return list(part)

    order = np.random.RandomState(7).permutation(length) if shuffle else np.arange(length)
    assert run_ranks(shard, size) == [
        list(order[slice(*shard_bounds(length, size, r, force_equal_length=force_equal_length))])
        for r in range(size)
    ]


def test_without_a_seed_ranks_still_share_one_permutation() -> None:
    def shard(comm):
        return list(scatter_dataset(list(range(40)), comm, shuffle=True, force_equal_length=False))

    first, second = run_ranks(shard, 2), run_ranks(shard, 2)
    assert sorted(first[0] + first[1]) == list(range(40))
    assert first != second


def test_the_root_s_arguments_count() -> None:
    def shard(comm):
        mine = {"shuffle": True, "seed": 3, "force_equal_length": False} if comm.rank == 1 else {}
        return scatter_dataset(list(range(5)), comm, 1, **mine).indices

    assert sum(run_ranks(shard, 2), []) == list(np.random.RandomState(3).permutation(5))


# ---- only the root has it


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("root", [0, -1])
@pytest.mark.parametrize("max_buf_len", [64, 2**20])
def test_each_rank_receives_its_shard(size: int, root: int, max_buf_len: int) -> None:
    root %= size
    source = images()

    def shard(comm):
        own = source if comm.rank == root else None
        part = scatter_dataset(own, comm, root, shuffle=True, seed=1, max_buf_len=max_buf_len)
        assert isinstance(part.dataset, ReceivedSamples)
        return part.indices, list(part)

    order = np.random.RandomState(1).permutation(21)
    for rank, (indices, samples) in enumerate(run_ranks(shard, size)):
        assert indices == list(order[slice(*shard_bounds(21, size, rank))])
        for index, (x, label) in zip(indices, samples, strict=True):
            assert torch.equal(x, source[index][0])
            assert label == index
            assert label.dtype == torch.int64


@pytest.mark.parametrize("length", [0, 1, 2])
def test_fewer_samples_than_ranks(length: int) -> None:
    def samples(comm):
        part = scatter_dataset(images(length) if comm.rank == 0 else None, comm)
        return [int(label) for _, label in part]

    bounds = [shard_bounds(length, 3, rank) for rank in range(3)]
    assert run_ranks(samples, 3) == [list(range(*bound)) for bound in bounds]


def test_the_root_reads_each_sample_once_and_others_nothing() -> None:
    source = Readings(10)
    run_ranks(lambda c: list(scatter_dataset(source if c.rank == 0 else None, c)), 2)
    assert source.num_reads == [1] * 10


def test_work_longer_than_the_time_limit_is_no_failure() -> None:
    timeout_s = limit(0.8)

    class Slow(Readings):
        def __getitem__(self, index: int) -> int:
            time.sleep(timeout_s / 8)
            return super().__getitem__(index)

    def samples(comm):
        return list(scatter_dataset(Slow(12) if comm.rank == 0 else None, comm))

    assert sum(run_ranks(samples, 2, timeout_s=timeout_s), []) == list(range(12))


@pytest.mark.processes
@pytest.mark.mpi
def test_ranks_that_are_processes(mpi_pool: MpiPool) -> None:
    assert mpi_pool.run(process_main, 2) == [[0, 1, 2], [2, 3, 4]]


# ---- errors reach all ranks


class Broken(Readings):
    def __getitem__(self, index: int) -> int:
        if index == 4:
            raise ZeroDivisionError("no such picture")
        return index


class Unpicklable:
    def __init__(self) -> None:
        self.function = lambda: None


class Lengthless:
    def __getitem__(self, index: int) -> int:
        return index


ERRORS = {
    "the data set raises": (Broken(9), DataError, "sample 4 of 9: ZeroDivisionError: no such"),
    "no length": (Lengthless(), UsageError, "Lengthless, has no length"),
    "None at the root": (None, UsageError, "rank 0 is the root and passed None"),
    "pickle without trust": ([{1, 2}, Unpicklable()], UnsupportedError, "Sample 1"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_the_root_s_error_is_raised_on_all_ranks(case: str) -> None:
    source, kind, message = ERRORS[case]

    def attempt(comm):
        return scatter_dataset(source if comm.rank == 0 else None, comm)

    begin_s = time.monotonic()
    assert_refused(attempt, kind, message, size=3, is_trusted=False)
    assert time.monotonic() - begin_s < limit(10)


def test_data_sets_of_different_lengths_are_refused() -> None:
    def attempt(comm):
        return scatter_dataset(list(range(3 + comm.rank)), comm)

    assert_refused(attempt, RankMismatchError, "3 samples and rank 1 one of 4")


@pytest.mark.parametrize("arguments", [{"seed": -1}, {"seed": 2**32}, {"max_buf_len": 0}])
def test_arguments_out_of_range(arguments: dict[str, int]) -> None:
    def attempt(comm):
        return scatter_dataset([1, 2], comm, shuffle=True, **arguments)

    assert_refused(attempt, UsageError, str(*arguments.values()))
