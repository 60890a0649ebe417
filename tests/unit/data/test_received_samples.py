"""Samples that the root has sent come out as they went in."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.contracts.suites.communicator_contracts import require_same
from tests.unit.comm.test_object_codec import Own
from torchmn.data import scatter_dataset
from torchmn.data.received_samples import ReceivedSamples
from torchmn.errors import UnsupportedError
from torchmn.testing import run_ranks


def received(samples: list[Any]) -> ReceivedSamples:
    return ReceivedSamples(len(samples), np.arange(len(samples)), samples)


SAMPLES = {
    "bare tensor": [torch.full((2, 2), float(i)) for i in range(4)],
    "bfloat16": [torch.full((3,), i, dtype=torch.bfloat16) for i in range(4)],
    "bool tensor": [torch.tensor([i % 2 == 0]) for i in range(4)],
    "complex": [torch.tensor(1j * i) for i in range(4)],
    "not contiguous": [torch.arange(6.0).view(2, 3).t() * i for i in range(4)],
    "scalars of all kinds": [(i, i / 3, i % 2 == 0, np.float32(i), np.int16(-i)) for i in range(5)],
    "arrays": [(np.full((2,), i, ">f4"), np.array(i)) for i in range(3)],
    "list": [[torch.tensor(i), i] for i in range(3)],
    "dict": [{"y": i, "x": torch.tensor([i])} for i in range(3)],
    "no elements": [(torch.empty(0, 3), i) for i in range(3)],
    "nothing": [() for _ in range(3)],
    "dates": [np.datetime64("2020-01-01") + np.timedelta64(i, "D") for i in range(3)],
    "no samples": [],
    "lengths differ": [torch.ones(n) for n in (0, 3, 1)],
    "dtypes differ": [torch.ones(2), torch.ones(2, dtype=torch.float64)],
    "kinds differ": [1, 2.0, True],
    "large integer": [1, 2**80],
    "texts": ["", "a", "日本語"],
    "nested": [({"x": [1, None]}, (b"bytes", {3}))] * 2,
    "texts as arrays": [np.array("ab"), np.array("abc")],
    "keys differ": [{"a": 1}, {"b": 1}],
}


@pytest.mark.parametrize("case", SAMPLES)
def test_samples_are_those_of_the_root(case: str) -> None:
    samples = SAMPLES[case]

    def shards(comm):
        own = samples if comm.rank == 0 else None
        return list(scatter_dataset(own, comm, force_equal_length=False))

    first, second = run_ranks(shards, 2, is_trusted=False)
    require_same(first + second, samples)


@pytest.mark.parametrize("case", SAMPLES)
def test_a_pickle_holds_the_samples(case: str) -> None:
    again = pickle.loads(pickle.dumps(received(SAMPLES[case])))
    require_same(list(again), SAMPLES[case])


def test_a_read_makes_a_new_sample() -> None:
    copy = received([torch.zeros(2), torch.ones(2)])
    copy[1].add_(7)
    assert copy[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("index", [3, -4])
def test_index_outside(index: int) -> None:
    with pytest.raises(IndexError, match=f"Sample {index} of a data set with 3"):
        received([1, 2, 3])[index]


def test_samples_keep_their_indices() -> None:
    part = ReceivedSamples(4, np.array([0, 2]), ["a", "c"])
    assert (len(part), part[2], part[0], part[-2]) == (4, "c", "a", "c")
    with pytest.raises(IndexError, match="Sample 1 is not in this rank's shard, which has 2 of 4"):
        part[1]


def test_objects_need_trust() -> None:
    samples = [Own(i) for i in range(4)]

    def shards(comm):
        own = samples if comm.rank == 0 else None
        return list(scatter_dataset(own, comm, force_equal_length=False))

    assert sum(run_ranks(shards, 2), []) == samples
    with pytest.raises(UnsupportedError, match=r"Sample 0 .* is an Own, which needs pickle"):
        run_ranks(shards, 2, is_trusted=False)


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_data_loader_workers_read_the_same_memory(method: str) -> None:
    copy = received([(torch.full((2,), float(i)), i) for i in range(6)])
    loader = DataLoader(copy, batch_size=2, num_workers=1, multiprocessing_context=method)
    assert [labels.tolist() for _, labels in loader] == [[0, 1], [2, 3], [4, 5]]
    assert copy._content.is_shared() == (method == "spawn")  # not sent to the worker, then
