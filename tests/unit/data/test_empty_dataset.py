"""A data set with nothing in it keeps the length."""

from __future__ import annotations

import pytest

from torchmn.data import create_empty_dataset


@pytest.mark.parametrize("length", [0, 1, 10])
def test_length_and_samples(length: int) -> None:
    empty = create_empty_dataset(list(range(length)))
    assert len(empty) == length
    assert list(empty) == [()] * length


def test_index_outside() -> None:
    with pytest.raises(IndexError, match="Sample 2 of an empty data set with 2"):
        create_empty_dataset("ab")[2]
