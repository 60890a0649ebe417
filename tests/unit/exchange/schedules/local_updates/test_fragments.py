"""How parameters are cut into fragments, and what is set to zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchmn.exchange.schedules.local_updates.fragments import (
    FragmentSchedule,
    reset_momentum_,
    split_into_fragments,
    trained_and_frozen,
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


def test_integers_have_no_mean() -> None:
    whole = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    trained, frozen = trained_and_frozen([*named([3]), ("counts", whole)], ())
    assert ([name for name, _ in trained], frozen) == (["0"], [])


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


# ---- which fragment is due when ----


def due(order: FragmentSchedule) -> list[int]:
    found = []
    while order.take_due():
        found.append(order.advance())
    return found


@pytest.mark.parametrize(
    ("num_fragments", "expected"),
    [
        (1, [[], [], [], [0], [], [], [], [0]]),
        (2, [[], [0], [], [1], [], [0], [], [1]]),
        (4, [[0], [1], [2], [3], [0], [1], [2], [3]]),
        (8, [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_fragments_are_due_evenly_over_a_block(num_fragments, expected) -> None:
    order = FragmentSchedule(num_fragments, 16.0)
    found = []
    for _ in expected:
        order.count(4)
        found.append(due(order))
    assert found == expected


def test_what_a_step_sees_beyond_a_block_is_of_no_block() -> None:
    order = FragmentSchedule(1, 10.0)
    found = []
    for _ in range(6):
        order.count(7)
        found.append(due(order))
    assert found == [[], [0], [], [0], [], [0]]


def test_it_resumes_from_its_state_and_restarts() -> None:
    order, other = FragmentSchedule(2, 16.0), FragmentSchedule(2, 16.0)
    order.count(12)
    assert due(order) == [0]
    other.load_state_dict(order.state_dict())
    for each in (order, other):
        each.count(4)
        assert due(each) == [1]
    other.count(8)
    other.restart()
    other.count(7)
    assert due(other) == []
