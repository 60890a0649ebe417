"""Parts of a data set."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from torchmn.data import SubDataset, create_empty_dataset, split_dataset, split_dataset_n_random
from torchmn.data.permutations import draw_seed, is_seed, keyed_permutation, permutation
from torchmn.errors import UsageError


def test_a_part_in_order() -> None:
    part = SubDataset("abcdef", 2, 5)
    assert (len(part), list(part), part[-1], part.indices) == (3, ["c", "d", "e"], "e", [2, 3, 4])


def test_a_part_of_an_order() -> None:
    part = SubDataset("abcd", 1, 3, order=[3, 2, 0, 1])
    assert (list(part), part.indices) == (["c", "a"], [2, 0])


@pytest.mark.parametrize("order", [None, [5, 4, 3, 2, 1, 0]])
def test_slices_and_lists_are_lists_of_samples(order: list[int] | None) -> None:
    part = SubDataset("abcdef", 1, 6, order)
    samples = list(part)
    assert part[1:3] == samples[1:3]
    assert part[-2:] == samples[-2:]
    assert part[::-2] == samples[::-2]
    assert part[7:] == []
    assert part[[3, 0, -1]] == [samples[3], samples[0], samples[-1]]
    assert part[np.array([1, 2])] == samples[1:3]
    with pytest.raises(IndexError, match="Sample 5 of a part with 5"):
        part[[0, 5]]


def test_copies_and_pickles() -> None:
    part = SubDataset(list("abcdef"), 1, 4, order=[5, 4, 3, 2, 1, 0])
    for twin in (copy.copy(part), copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert (list(twin), twin.indices) == (list(part), part.indices)
    assert copy.copy(part).dataset is part.dataset


@pytest.mark.parametrize("index", [3, -4])
def test_index_outside(index: int) -> None:
    with pytest.raises(IndexError, match=f"Sample {index} of a part with 3"):
        SubDataset("abcdef", 2, 5)[index]


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 2), (0, 7)])
def test_bounds_outside(begin: int, end: int) -> None:
    with pytest.raises(UsageError, match=rf"{begin}\.\.{end} is outside of .* 6 samples"):
        SubDataset("abcdef", begin, end)


def test_order_of_another_length() -> None:
    with pytest.raises(UsageError, match="order has 2 entries and the data set 3 samples"):
        SubDataset("abc", 0, 3, order=[1, 0])


def test_split_in_two() -> None:
    first, rest = split_dataset("abcde", 2)
    assert (list(first), list(rest)) == (["a", "b"], ["c", "d", "e"])
    with pytest.raises(UsageError):
        split_dataset("abcde", 6)


@pytest.mark.parametrize(("length", "n"), [(0, 2), (2, 3), (12, 4), (14, 4), (5, 1)])
def test_split_at_random(length: int, n: int) -> None:
    parts = split_dataset_n_random(list(range(length)), n, seed=3)
    order = np.random.RandomState(3).permutation(length)
    size = length // n
    assert [list(part) for part in parts] == [
        list(order[i * size : (i + 1) * size]) for i in range(n)
    ]


def test_split_at_random_without_a_seed_differs() -> None:
    cuts = {tuple(split_dataset_n_random(range(50), 2)[0].indices) for _ in range(3)}
    assert len(cuts) == 3


@pytest.mark.parametrize(
    ("n", "seed", "message"), [(0, 1, "n=0 must be at least 1"), (2, -1, "It is -1")]
)
def test_split_at_random_refuses(n: int, seed: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split_dataset_n_random("abc", n, seed)


@pytest.mark.parametrize("length", [0, 1, 10])
def test_empty_data_set(length: int) -> None:
    assert create_empty_dataset(range(length)) == [()] * length


# ---- permutations are the same today and tomorrow: a resumed run needs that ----


def test_permutations_never_change() -> None:
    assert permutation(8, 0).tolist() == [6, 2, 1, 7, 3, 0, 5, 4]
    assert keyed_permutation(8, 0, 0).tolist() == [6, 3, 5, 0, 7, 2, 1, 4]
    assert keyed_permutation(8, 0, 1).tolist() == [3, 1, 0, 4, 5, 6, 7, 2]
    assert keyed_permutation(8, 0, 1, 2).tolist() == [5, 1, 4, 6, 7, 2, 3, 0]


@pytest.mark.parametrize("seed", [0, 2**32 - 1, np.int64(5)])
def test_seeds(seed: int) -> None:
    assert is_seed(seed)
    assert sorted(permutation(5, seed)) == list(range(5))


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "7"])
def test_what_is_no_seed(seed: object) -> None:
    assert not is_seed(seed)
    with pytest.raises(UsageError, match=f"It is {seed!r}"):
        permutation(5, seed)


def test_drawn_seeds_differ() -> None:
    assert len({draw_seed() for _ in range(4)}) > 1
