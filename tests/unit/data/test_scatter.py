"""scatter_index and scatter_dataset: the two rules, what travels, and how errors reach all."""

from __future__ import annotations

import errno
import functools
import math
import os
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from tests.limits import limit
from tests.mpi_pool import MpiPool
from torchmn.cluster import Topology
from torchmn.comm.transports.shared_segment import SharedMemorySegment
from torchmn.data import scatter_dataset, scatter_index, shard_bounds
from torchmn.data.packed_samples import PackedSamples
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


def outcome(function, comm):
    """The result, or the error with the seconds it took."""
    begin_s = time.monotonic()
    try:
        return function(comm)
    except TorchmnError as error:
        return error, time.monotonic() - begin_s


def process_main(comm):
    part = scatter_dataset(images(5) if comm.rank == 0 else None, comm)
    return [int(label) for _, label in part], part.dataset.memory.address().inode


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
        return outcome(lambda c: scatter_index(length if c.rank == 1 else 5, c), comm)

    errors = [error for error, _ in run_ranks(indices, 3)]
    assert all(isinstance(error, UsageError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "Rank 1" in str(errors[0])
    assert seen in str(errors[0])


@pytest.mark.parametrize("root", [-1, 2])
def test_root_outside_the_world(root: int) -> None:
    errors = run_ranks(lambda c: outcome(lambda c: scatter_index(5, c, root), c), 2)
    assert all("root=" in str(error) and "0 to 1" in str(error) for error, _ in errors)


def test_ranks_with_different_roots_are_refused() -> None:
    errors = run_ranks(lambda c: outcome(lambda c: scatter_index(5, c, c.rank), c), 2)
    assert all(isinstance(error, RankMismatchError) for error, _ in errors)
    assert all("root=[0, 1]" in str(error) for error, _ in errors)


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

PLACEMENTS = [
    Topology.blocks([2]),
    Topology.blocks([1, 1]),
    Topology.blocks([2, 2]),
    Topology.blocks([3, 1]),
    Topology(("a", "b", "a", "b")),
    Topology.blocks([1, 1, 1]),
]


@pytest.mark.parametrize("topology", PLACEMENTS, ids=str)
@pytest.mark.parametrize("root", [0, -1])
def test_one_copy_per_node(topology: Topology, root: int) -> None:
    root %= topology.size
    source = images()

    def shard(comm):
        part = scatter_dataset(
            source if comm.rank == root else None, comm, root, shuffle=True, seed=1, max_buf_len=64
        )
        assert isinstance(part.dataset, PackedSamples)
        facts = part.dataset.memory.address()
        return comm.inter_rank, facts.inode, part.indices, list(part)

    results = run_ranks(shard, topology.size, topology=topology)
    copies = {node: {inode for at, inode, _, _ in results if at == node} for node, *_ in results}
    assert all(len(inodes) == 1 for inodes in copies.values())
    assert len(set().union(*copies.values())) == len(topology.nodes)
    for rank, (_, _, indices, samples) in enumerate(results):
        order = np.random.RandomState(1).permutation(21)
        assert indices == list(order[slice(*shard_bounds(21, topology.size, rank))])
        for index, (x, label) in zip(indices, samples, strict=True):
            assert torch.equal(x, source[index][0])
            assert label == index
            assert label.dtype == torch.int64


@pytest.mark.parametrize("topology", [Topology.blocks([2]), Topology.blocks([1, 1])], ids=str)
def test_samples_of_different_lengths_travel_encoded(topology: Topology) -> None:
    source = [("a" * n, list(range(n)), torch.ones(n)) for n in range(9)]

    def samples(comm):
        part = scatter_dataset(source if comm.rank == 0 else None, comm, force_equal_length=False)
        return list(part)

    parts = run_ranks(samples, 2, topology=topology, is_trusted=False)
    for (text, numbers, ones), expected in zip(parts[0] + parts[1], source, strict=True):
        assert (text, numbers) == expected[:2]
        assert torch.equal(ones, expected[2])


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("topology", [Topology.blocks([3]), Topology.blocks([1, 2])], ids=str)
def test_fewer_samples_than_ranks(length: int, topology: Topology) -> None:
    def samples(comm):
        part = scatter_dataset(images(length) if comm.rank == 0 else None, comm)
        return [int(label) for _, label in part]

    bounds = [shard_bounds(length, 3, rank) for rank in range(3)]
    assert run_ranks(samples, 3, topology=topology) == [list(range(*bound)) for bound in bounds]


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


@pytest.mark.parametrize("topology", [Topology.blocks([2]), Topology.blocks([1, 1])], ids=str)
def test_the_copy_has_no_name(memory_folder: str, topology: Topology) -> None:
    def listing(comm):
        own = images() if comm.rank == 0 else None
        part = scatter_dataset(own, comm, shared_directory=memory_folder)
        return len(part), os.listdir(memory_folder)

    assert run_ranks(listing, 2, topology=topology) == [(11, []), (11, [])]


@pytest.mark.processes
@pytest.mark.mpi
def test_ranks_that_are_processes(mpi_pool: MpiPool) -> None:
    for topology in (Topology.blocks([2]), Topology.blocks([1, 1])):
        results = mpi_pool.run(process_main, 2, topology=topology)
        assert [labels for labels, _ in results] == [[0, 1, 2], [2, 3, 4]]
        assert len({inode for _, inode in results}) == len(topology.nodes)


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
    "structured": ([np.zeros(1, [("a", "i4")])[0]], UnsupportedError, "structured"),
}


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("call", "topology"),
    [("map_private", Topology.blocks([2])), ("map_shared", Topology.blocks([1, 1]))],
    ids=str,
)
def test_memory_that_one_rank_cannot_map(
    monkeypatch: pytest.MonkeyPatch, call: str, topology: Topology, failing: int
) -> None:
    own = threading.local()
    original = getattr(SharedMemorySegment, call)

    def fail(self):
        if own.rank == failing:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return original(self)

    monkeypatch.setattr(SharedMemorySegment, call, fail)

    def attempt(comm):
        own.rank = comm.rank
        encoded = [{1, 2}, {3}]
        scatter = functools.partial(scatter_dataset, encoded if comm.rank == 0 else None)
        return outcome(scatter, comm)

    for error, seconds in run_ranks(attempt, 2, topology=topology, timeout_s=limit(30)):
        assert isinstance(error, DataError)
        assert f"Rank {failing} on {topology.hosts[failing]}: " in str(error)
        assert "Cannot allocate memory" in str(error)
        assert seconds < 15


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize("topology", [Topology.blocks([3]), Topology.blocks([1, 2])], ids=str)
def test_the_root_s_error_is_raised_on_all_ranks(case: str, topology: Topology) -> None:
    source, kind, message = ERRORS[case]

    def attempt(comm):
        scatter = functools.partial(scatter_dataset, source if comm.rank == 0 else None)
        return outcome(scatter, comm)

    results = run_ranks(attempt, 3, topology=topology, is_trusted=False)
    assert all(type(error) is kind for error, _ in results)
    assert len({str(error) for error, _ in results}) == 1
    assert message in str(results[0][0])
    assert all(seconds < 10 for _, seconds in results)


def test_too_little_room_on_another_node(memory_folder: str) -> None:
    """The second node finds its folder missing: the node of the root raises as well."""

    def attempt(comm):
        own = images() if comm.rank == 0 else None
        folder = memory_folder if comm.rank == 0 else f"{memory_folder}/gone"
        return outcome(lambda c: scatter_dataset(own, c, shared_directory=folder), comm)

    results = run_ranks(attempt, 3, topology=Topology.blocks([1, 2]))
    assert {str(error) for error, _ in results} == {str(results[0][0])}
    assert str(results[0][0]).startswith("Rank 1 on node1")


def test_data_sets_of_different_lengths_are_refused() -> None:
    results = run_ranks(
        lambda c: outcome(lambda c: scatter_dataset(list(range(3 + c.rank)), c), c), 2
    )
    assert all(isinstance(error, RankMismatchError) for error, _ in results)
    assert all("3 samples and rank 1 one of 4" in str(error) for error, _ in results)


@pytest.mark.parametrize("arguments", [{"seed": -1}, {"seed": 2**32}, {"max_buf_len": 0}])
def test_arguments_out_of_range(arguments: dict[str, int]) -> None:
    results = run_ranks(
        lambda c: outcome(lambda c: scatter_dataset([1, 2], c, shuffle=True, **arguments), c), 2
    )
    assert all(isinstance(error, UsageError) for error, _ in results)
    assert all(str(*arguments.values()) in str(error) for error, _ in results)
