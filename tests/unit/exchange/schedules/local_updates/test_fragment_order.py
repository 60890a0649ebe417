"""Which fragment is due when."""

from __future__ import annotations

import pytest

from torchmn.exchange.schedules.local_updates.fragments import FragmentSchedule


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
