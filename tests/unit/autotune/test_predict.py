"""Predictions from measured numbers."""

from __future__ import annotations

import pytest

from torchmn.autotune.predict import (
    CodecFacts,
    Plan,
    ReadyGradient,
    StepFacts,
    predict_step_s,
    ranked,
    shortlist,
)
from torchmn.communicators.link_speed import LinkSpeed
from torchmn.units import MiB

LINK = LinkSpeed(latency_s=0.0, bandwidth_bytes_per_s=1e6)
FLOAT32 = CodecFacts(name="float32")
INT8 = CodecFacts(name="int8", bits=8.0, coding_s=1e-6)


def facts(*ready: float, nbytes: int = 1_000_000, compute_s: float = 10.0) -> StepFacts:
    return StepFacts(
        compute_s=compute_s,
        backward_s=6.0,
        gradients=tuple(
            ReadyGradient(ready_s=r, numel=nbytes // 4, nbytes=nbytes, is_small=False)
            for r in ready
        ),
    )


def plan(schedule: str = "every_step", codec: str = "float32", bucket_bytes: int = 1) -> Plan:
    return Plan(schedule=schedule, codec=codec, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize(
    ("ready", "expected_s"),
    [
        ((1.0, 2.0, 3.0), 10.0),  # gone at 4, before backward ends
        ((4.0, 5.0, 6.0), 11.0),  # the last one leaves when backward has ended
        ((6.0, 6.0, 6.0), 13.0),  # one after the other
    ],
)
def test_what_backward_does_not_hide_is_added(ready: tuple, expected_s: float) -> None:
    # two ranks: each byte is sent once
    assert predict_step_s(plan(), facts(*ready), FLOAT32, LINK, 2) == pytest.approx(expected_s)


def test_three_ranks_send_a_third_more() -> None:
    got = predict_step_s(plan(), facts(6.0), FLOAT32, LINK, 3)
    assert got == pytest.approx(10 + 4 / 3)


def test_a_large_bucket_waits_for_its_last_gradient() -> None:
    step = facts(1.0, 2.0, 6.0)
    assert predict_step_s(plan(bucket_bytes=1), step, FLOAT32, LINK, 2) == pytest.approx(11.0)
    assert predict_step_s(plan(bucket_bytes=9 * MiB), step, FLOAT32, LINK, 2) == pytest.approx(13.0)


def test_a_codec_sends_less_and_computes_more() -> None:
    got = predict_step_s(plan(codec="int8"), facts(6.0), INT8, LINK, 2)
    assert got == pytest.approx(10 + 0.25 + 0.25)


def test_small_parameters_are_not_encoded() -> None:
    small = ReadyGradient(ready_s=6.0, numel=250_000, nbytes=1_000_000, is_small=True)
    step = StepFacts(compute_s=10.0, backward_s=6.0, gradients=(small,))
    assert predict_step_s(plan(codec="int8"), step, INT8, LINK, 2) == pytest.approx(11.0)


def test_each_message_waits_for_the_latency() -> None:
    slow = LinkSpeed(latency_s=0.5, bandwidth_bytes_per_s=1e6)
    step = facts(6.0, 6.0)
    assert predict_step_s(plan(bucket_bytes=1), step, FLOAT32, slow, 2) == pytest.approx(14.0)
    assert predict_step_s(plan(bucket_bytes=9 * MiB), step, FLOAT32, slow, 2) == pytest.approx(13)


def test_a_step_late_overlaps_with_the_whole_step() -> None:
    late = plan("double_buffering")
    assert predict_step_s(late, facts(6.0, 6.0), FLOAT32, LINK, 2) == pytest.approx(10.0)
    assert predict_step_s(late, facts(*[6.0] * 12), FLOAT32, LINK, 2) == pytest.approx(12.0)


def test_the_next_forward_hides_all_but_a_chunk() -> None:
    got = predict_step_s(plan("every_step_next_forward"), facts(6.0, 6.0), FLOAT32, LINK, 2)
    assert 10.0 < got < 12.0


def test_one_rank_sends_nothing() -> None:
    assert predict_step_s(plan(), facts(6.0), FLOAT32, LINK, 1) == 10.0
    assert predict_step_s(plan(), facts(6.0), FLOAT32, None, 4) == 10.0


def test_the_fastest_is_first_and_among_equals_the_plainest() -> None:
    plans = [plan(), plan(codec="int8"), plan("double_buffering")]
    slow = ranked(plans, facts(*[6.0] * 9), [FLOAT32, INT8], LINK, 2)
    assert [p for _, p in slow] == [plan("double_buffering"), plan(codec="int8"), plan()]
    fast = ranked(plans, facts(1.0), [FLOAT32, INT8], LINK, 2)
    assert fast[0][1] == plan()


def test_the_shortlist_holds_the_best_bucket_of_each_kind() -> None:
    predictions = [
        (1.0, plan(bucket_bytes=4)),
        (1.1, plan(bucket_bytes=1)),
        (1.2, plan(codec="int8")),
        (1.4, plan("double_buffering")),
        (1.6, plan("double_buffering", "int8")),
    ]
    best = [plan(bucket_bytes=4), plan(codec="int8"), plan("double_buffering")]
    assert shortlist(predictions, within=1.5, max_plans=9) == best
    assert shortlist(predictions, within=1.5, max_plans=2) == best[:2]
