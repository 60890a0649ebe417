"""Permutations are the same today and tomorrow: a run resumed on another machine needs that."""

from __future__ import annotations

import numpy as np
import pytest

from torchmn.data.permutations import draw_seed, is_seed, keyed_permutation, permutation
from torchmn.errors import UsageError


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
