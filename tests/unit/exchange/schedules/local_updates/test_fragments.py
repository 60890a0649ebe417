"""How parameters are cut into fragments, and what is set to zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchmn.errors import UsageError
from torchmn.exchange.schedules.local_updates.fragments import (
    averageable,
    reset_momentum_,
    split_into_fragments,
)


def named(sizes: list[int]) -> list[tuple[str, nn.Parameter]]:
    return [(str(i), nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.data())
def test_consecutive_none_empty_none_lost(sizes: list[int], data: st.DataObject) -> None:
    num = data.draw(st.integers(1, len(sizes)))
    parameters = named(sizes)
    parts = split_into_fragments(parameters, num)
    assert len(parts) == num
    assert all(parts)
    assert [name for part in parts for name, _ in part] == [name for name, _ in parameters]


def test_parts_have_about_the_same_number_of_bytes() -> None:
    parts = split_into_fragments(named([10] * 12), 4)
    assert [len(part) for part in parts] == [3, 3, 3, 3]
    parts = split_into_fragments(named([1, 1, 1, 97, 50, 50]), 2)
    assert [len(part) for part in parts] == [4, 2]


def test_more_fragments_than_parameters() -> None:
    with pytest.raises(UsageError, match="num_fragments=3, but the optimizer has 2 parameters"):
        split_into_fragments(named([4, 4]), 3)


def test_integers_have_no_mean() -> None:
    whole = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    names = [name for name, _ in averageable([*named([3]), ("counts", whole)])]
    assert names == ["0"]


def test_only_first_moments_are_reset() -> None:
    (_, one), (_, two) = named([3, 3])
    state = {
        p: {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3), "step": torch.tensor(5.0)}
        for p in (one, two)
    }
    reset_momentum_(state, [one])
    assert not state[one]["exp_avg"].any()
    assert state[one]["exp_avg_sq"].all()
    assert state[one]["step"] == 5
    assert state[two]["exp_avg"].all()
    reset_momentum_({}, [one])
    reset_momentum_({one: {"momentum_buffer": None}}, [one])
