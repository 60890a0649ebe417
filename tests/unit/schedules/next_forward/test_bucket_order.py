"""In which order buckets are sent, from times alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmn.errors import UsageError
from torchmn.schedules.next_forward.bucket_order import BucketOrder, BucketTimes, plan_order


def layers(*link_s: float, backward_s: float = 1.0) -> list[BucketTimes]:
    """Buckets by index as buckets have them, the last layer first; one layer each."""
    num = len(link_s)
    return [
        BucketTimes(link_s=s, ready_s=backward_s * i / num, needed_s=float(num - i))
        for i, s in enumerate(link_s)
    ]


def test_late_layers_are_sent_during_backward_then_early_ones_then_the_rest() -> None:
    plan = plan_order(layers(0.4, 0.4, 0.4, 0.3, 0.3), backward_s=1.0)
    assert plan.order == (0, 1, 5, 4, 3, 2)  # 5: the footer
    assert plan.num_early == 2


def test_a_short_bucket_fits_where_a_long_one_does_not() -> None:
    plan = plan_order(layers(0.4, 0.4, 0.4, 0.1, 0.05), backward_s=1.0)
    assert plan.order == (0, 1, 3, 4, 5, 2)
    assert plan.num_early == 4


def test_on_a_fast_link_all_but_the_first_layer_are_sent_during_backward() -> None:
    plan = plan_order(layers(0.01, 0.01, 0.01, 0.01), backward_s=1.0)
    assert plan.order == (0, 1, 2, 3, 4)
    assert plan.num_early == 4


def test_on_a_very_slow_link_early_layers_come_first() -> None:
    plan = plan_order(layers(9.0, 9.0, 9.0), backward_s=1.0)
    assert plan.order == (3, 2, 1, 0)
    assert plan.num_early == 0


def test_of_what_is_ready_the_soonest_needed_is_sent_first() -> None:
    times = [
        BucketTimes(link_s=0.3, ready_s=0.0, needed_s=9.0),
        BucketTimes(link_s=0.3, ready_s=0.0, needed_s=8.0),
        BucketTimes(link_s=0.3, ready_s=0.2, needed_s=1.0),
    ]
    plan = plan_order(times, backward_s=0.7)
    assert plan.order == (1, 2, 3, 0)


def test_a_gradient_may_be_a_little_late_without_holding_up_others() -> None:
    times = [
        BucketTimes(link_s=0.5, ready_s=0.0, needed_s=9.0),
        BucketTimes(link_s=0.1, ready_s=0.49, needed_s=1.0),
        BucketTimes(link_s=0.1, ready_s=0.0, needed_s=8.0),
    ]
    # Number 1 is ready just before the link is free: not planned as the next one.
    assert plan_order([times[0], times[1], times[2]], backward_s=1.0).order[:2] == (2, 0)


def test_routes_that_block_send_nothing_after_backward() -> None:
    plan = plan_order(layers(0.1, 0.1), backward_s=1.0, overlaps_backward=False)
    assert plan.order == (2, 1, 0)
    assert plan.num_early == 0


def test_what_has_no_gradient_and_is_not_used_comes_last() -> None:
    never = float("inf")
    times = [BucketTimes(link_s=0.1, ready_s=never, needed_s=never), *layers(0.1, 0.1)]
    assert plan_order(times, backward_s=1.0).order == (1, 2, 3, 0)


seconds = st.floats(0, 10, allow_nan=False)


@given(
    st.lists(st.tuples(seconds, st.one_of(seconds, st.just(float("inf"))), seconds), max_size=12),
    seconds,
)
def test_whatever_is_measured_it_is_an_order_that_fits(rows, backward_s) -> None:
    times = [BucketTimes(link_s=w, ready_s=r, needed_s=n) for w, r, n in rows]
    plan = plan_order(times, backward_s=backward_s)
    assert sorted(plan.order) == list(range(len(times) + 1))
    early, rest = (
        plan.order[: plan.num_early],
        plan.order[plan.num_early + 1 :],
    )
    assert plan.order[plan.num_early] == len(times)
    assert sum(times[i].link_s for i in early) <= backward_s + 1e-9
    assert all(times[i].ready_s <= backward_s for i in early)
    assert [times[i].needed_s for i in rest] == sorted(times[i].needed_s for i in rest)


@pytest.mark.parametrize(("order", "num"), [((0, 0), 0), ((1, 2), 0), ((0, 1), 3), ((0, 1), -1)])
def test_no_plan_loses_a_bucket(order, num) -> None:
    with pytest.raises(UsageError):
        BucketOrder(order=order, num_early=num)
