"""Samples come out of shared memory as they went in."""

from __future__ import annotations

import os
import pickle
from copy import deepcopy
from multiprocessing.context import set_spawning_popen
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.contracts.suites.communicator_contracts import require_same
from tests.unit.comm.test_object_codec import Own
from torchmn.comm.object_codec import Trust
from torchmn.data.packed_samples import PackedSamples, pack_dataset
from torchmn.errors import UnsupportedError

UNTRUSTED = Trust()


def packed(samples: Any, trust: Trust = UNTRUSTED) -> PackedSamples:
    memory, layout = pack_dataset(samples, trust)
    return PackedSamples(memory, layout, trust)


STACKED = {
    "bare tensor": [torch.full((2, 2), float(i)) for i in range(4)],
    "bfloat16": [torch.full((3,), i, dtype=torch.bfloat16) for i in range(4)],
    "bool tensor": [torch.tensor([i % 2 == 0]) for i in range(4)],
    "not contiguous": [torch.arange(6.0).view(2, 3).t() * i for i in range(4)],
    "scalars of all kinds": [(i, i / 3, i % 2 == 0, np.float32(i), np.int16(-i)) for i in range(5)],
    "arrays": [(np.full((2,), i, ">f4"), np.array(i)) for i in range(3)],
    "list": [[torch.tensor(i), i] for i in range(3)],
    "dict": [{"y": i, "x": torch.tensor([i])} for i in range(3)],
    "no elements": [(torch.empty(0, 3), i) for i in range(3)],
    "nothing": [() for _ in range(3)],
    "dates": [np.datetime64("2020-01-01") + np.timedelta64(i, "D") for i in range(3)],
    "no samples": [],
}
ENCODED = {
    "lengths differ": [torch.ones(n) for n in (0, 3, 1)],
    "dtypes differ": [torch.ones(2), torch.ones(2, dtype=torch.float64)],
    "kinds differ": [1, 2.0, True],
    "large integer": [1, 2**80],
    "texts": ["", "a", "日本語"],
    "nested": [({"x": [1, None]}, (b"bytes", {3}))] * 2,
    "texts as arrays": [np.array("ab"), np.array("abc")],
    "keys differ": [{"a": 1}, {"b": 1}],
    "order of keys differs": [{"a": 1, "b": 2}, {"b": 1, "a": 2}],
}


@pytest.mark.parametrize("case", STACKED)
def test_stacked(case: str) -> None:
    copy = packed(STACKED[case])
    assert copy.layout.container != "encoded"
    require_same([copy[i] for i in range(len(copy))], STACKED[case])


@pytest.mark.parametrize("case", ENCODED)
def test_encoded(case: str) -> None:
    copy = packed(ENCODED[case])
    assert copy.layout.container == "encoded"
    require_same([copy[i] for i in range(len(copy))], ENCODED[case])


def test_every_sample_is_read_once_even_when_the_last_is_different() -> None:
    reads: list[int] = []

    class Source:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> torch.Tensor:
            reads.append(index)
            return torch.full((1 + index // 5,), float(index))

    copy = packed(Source())
    assert reads == list(range(6))
    assert [x.tolist() for x in copy] == [[0], [1], [2], [3], [4], [5, 5]]


def test_samples_are_views_and_changes_stay_private() -> None:
    memory, layout = pack_dataset(TensorDataset(torch.zeros(3, 2)), UNTRUSTED)
    one, other = PackedSamples(memory, layout, UNTRUSTED), PackedSamples(memory, layout, UNTRUSTED)
    one[1][0].add_(7)
    assert one[1][0].tolist() == [7, 7]
    assert other[1][0].tolist() == [0, 0]


@pytest.mark.parametrize("index", [3, -4])
def test_index_outside(index: int) -> None:
    with pytest.raises(IndexError, match=f"Sample {index} of a data set with 3"):
        packed([1, 2, 3])[index]


def test_objects_need_trust() -> None:
    samples = [Own(i) for i in range(3)]
    with pytest.raises(UnsupportedError, match=r"Sample 0 .* is an Own, which needs pickle"):
        packed(samples)
    for trust in (Trust(is_private=True), Trust(secret=b"text")):
        assert list(packed(samples, trust)) == samples


def test_tensors_elsewhere_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="tensor on meta"):
        packed([torch.empty(2, device="meta")])


@pytest.mark.parametrize("samples", [STACKED["dict"], ENCODED["nested"]])
def test_pickled_for_a_process_that_is_started(samples: list[Any]) -> None:
    copy = packed(samples)
    set_spawning_popen(object())
    try:
        payload = pickle.dumps(copy)
    finally:
        set_spawning_popen(None)
    again = pickle.loads(payload)
    assert again.memory.address().inode == copy.memory.address().inode
    require_same(list(again), samples)


@pytest.mark.parametrize("kind", [*STACKED, *ENCODED])
def test_any_other_pickle_holds_the_samples(kind: str) -> None:
    samples = {**STACKED, **ENCODED}[kind]
    copy = packed(samples)
    payload = pickle.dumps(copy)
    del copy  # and with it the shared memory
    again = pickle.loads(payload)
    require_same(list(again), list(samples))
    require_same(list(pickle.loads(pickle.dumps(again))), list(samples))


@pytest.mark.parametrize("kind", ["dict", "scalars of all kinds", "texts"])
def test_a_copy_of_some_samples_keeps_their_indices(kind: str) -> None:
    samples = list({**STACKED, **ENCODED}[kind])
    part = packed(samples).only([2, 0, 2])
    assert len(part) == len(samples)
    require_same([part[2], part[0]], [samples[2], samples[0]])
    require_same(part[2 - len(samples)], samples[2])
    with pytest.raises(
        IndexError, match=f"Sample 1 is not in this copy, which has only 2 of {len(samples)}"
    ):
        part[1]


def test_a_pickle_takes_no_secret_along() -> None:
    copy = packed([Own(3), 2], Trust(secret=b"of the job"))
    payload = pickle.dumps(copy)
    assert b"of the job" not in payload
    assert list(pickle.loads(payload)) == [Own(3), 2]


@pytest.mark.parametrize("is_own", [False, True])
def test_copies_in_memory_change_apart(is_own: bool) -> None:
    first = packed([torch.zeros(2), torch.ones(2)])
    first = first.only([0, 1]) if is_own else first
    second = deepcopy(first)
    first[0].add_(5)
    assert second[0].tolist() == [0.0, 0.0]
    assert second[1].tolist() == [1.0, 1.0]


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_data_loader_workers_read_the_same_memory(method: str) -> None:
    copy = packed([(torch.full((2,), float(i)), i) for i in range(6)])
    loader = DataLoader(copy, batch_size=2, num_workers=1, multiprocessing_context=method)
    assert [labels.tolist() for _, labels in loader] == [[0, 1], [2, 3], [4, 5]]


def test_files_are_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        packed([1, 2, 3])
    assert len(os.listdir("/proc/self/fd")) <= before + 1
