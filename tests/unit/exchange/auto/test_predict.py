"""Predictions from measured numbers."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest

from torchmn.cluster.units import MiB
from torchmn.comm.create import ROUTES
from torchmn.comm.link_speed import LinkSpeed
from torchmn.errors import UnknownNameError, UsageError
from torchmn.exchange.auto.predict import (
    Cluster,
    CodecFacts,
    Part,
    Plan,
    ReadyGradient,
    StepFacts,
    StepSimulation,
    crossing,
    expected_maximum,
    predict_step,
    predict_step_s,
    ranked,
    shortlist,
)

LINK = LinkSpeed(latency_s=0.0, bandwidth_bytes_per_s=1e6)
FLOAT32 = CodecFacts(name="float32")
INT8 = CodecFacts(name="int8", bits=8.0, encode_s=1e-6)


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


LARGE, LATE, ENCODED = plan(bucket_bytes=9 * MiB), plan("double_buffering"), plan(codec="int8")
SLOW = LinkSpeed(latency_s=0.5, bandwidth_bytes_per_s=1e6)
SMALL = ReadyGradient(ready_s=6.0, numel=250_000, nbytes=1_000_000, is_small=True)
OF_SMALL = StepFacts(compute_s=10.0, backward_s=6.0, gradients=(SMALL,))
# On two ranks each byte is sent once.
PREDICTED_S = {
    "gone before backward ends": (plan(), facts(1.0, 2.0, 3.0), FLOAT32, LINK, 2, 10.0),
    "the last leaves when backward ends": (plan(), facts(4.0, 5.0, 6.0), FLOAT32, LINK, 2, 11.0),
    "one after the other": (plan(), facts(6.0, 6.0, 6.0), FLOAT32, LINK, 2, 13.0),
    "buckets of one gradient": (plan(), facts(1.0, 2.0, 6.0), FLOAT32, LINK, 2, 11.0),
    "a bucket waits for its last one": (LARGE, facts(1.0, 2.0, 6.0), FLOAT32, LINK, 2, 13.0),
    "a codec sends less and computes": (ENCODED, facts(6.0), INT8, LINK, 2, 10 + 0.25 + 0.25),
    "small parameters are not encoded": (ENCODED, OF_SMALL, INT8, LINK, 2, 11.0),
    # Two ranks swap what they have in one round; a codec needs two.
    "latency of each message": (plan(), facts(6.0, 6.0), FLOAT32, SLOW, 2, 13.0),
    "latency of one message": (LARGE, facts(6.0, 6.0), FLOAT32, SLOW, 2, 12.5),
    "latency of rounds": (plan(), facts(6.0, 6.0), FLOAT32, SLOW, 3, 10 + 14 / 3),
    "a step late": (LATE, facts(6.0, 6.0), FLOAT32, LINK, 2, 10.0),
    "longer than a step": (LATE, facts(*[6.0] * 12), FLOAT32, LINK, 2, 12.0),
    "one rank sends nothing": (plan(), facts(6.0), FLOAT32, LINK, 1, 10.0),
    "no network": (plan(), facts(6.0), FLOAT32, None, 4, 10.0),
}


@pytest.mark.parametrize("case", PREDICTED_S)
def test_the_time_of_a_step(case: str) -> None:
    *given, expected_s = PREDICTED_S[case]
    assert predict_step_s(*given) == pytest.approx(expected_s)


def test_the_fastest_is_first_and_among_equals_the_plainest() -> None:
    plans = [plan(), plan(codec="int8"), plan("double_buffering")]
    slow = ranked(plans, facts(*[6.0] * 9), [FLOAT32, INT8], LINK, 2)
    assert [p for _, p in slow] == [plan("double_buffering"), plan(codec="int8"), plan()]
    fast = ranked(plans, facts(1.0), [FLOAT32, INT8], LINK, 2)
    assert fast[0][1] == plan()


def test_a_codec_that_cannot_be_timed_is_last_and_is_tried_if_it_is_the_only_one() -> None:
    untimed = CodecFacts(name="power_sgd", encode_s=math.inf, decode_s=math.inf)
    plans = [plan(codec="power_sgd"), plan("double_buffering", "power_sgd"), plan()]
    with pytest.raises(UsageError, match="cannot be timed by itself"):
        predict_step_s(plans[0], facts(6.0), untimed, LINK, 2)
    found = ranked(plans, facts(6.0), [FLOAT32, untimed], LINK, 2)
    assert [p for _, p in found] == [plan(), *plans[:2]]
    assert shortlist(found, within=1.5, max_plans=9) == [plan()]
    assert shortlist(found[1:], within=1.5, max_plans=9) == plans[:2]


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


def cluster(**options: object) -> Cluster:
    return Cluster(**{"num_hosts": 2, "link": LINK, **options})  # type: ignore[arg-type]


def test_ranks_that_share_a_core_take_turns() -> None:
    alone = predict_step(plan(), facts(1.0), FLOAT32, cluster(num_hosts=1, cores_per_rank=0.5))
    assert alone.seconds == pytest.approx(20.0)
    shared = predict_step(plan(), facts(6.0), FLOAT32, cluster(cores_per_rank=0.5))
    assert shared.seconds == pytest.approx(21.0)  # the link is no slower


def test_sending_takes_time_of_the_core_that_computes() -> None:
    costs = 2e-6  # two seconds for a bucket, which takes one
    early = facts(1.0)
    one = predict_step(plan(), early, FLOAT32, cluster(send_s_per_byte=costs))
    assert one.seconds == pytest.approx(12.0)
    assert one.coding_s == pytest.approx(2.0)
    two = predict_step(plan(), early, FLOAT32, cluster(send_s_per_byte=costs, cores_per_rank=2.0))
    assert two.seconds == pytest.approx(10.0)


def test_the_ranks_of_a_host_compete_for_its_adapter() -> None:
    flat = cluster(ranks_per_host=4, route="flat")
    together = cluster(ranks_per_host=4, route="two_dimensional")
    step = facts(6.0)
    # 2 k (W - k) / W = 4 times the bytes, against 2 (H - 1) / H = 1
    assert predict_step(plan(), step, FLOAT32, flat).exposed_s == pytest.approx(4.0)
    assert predict_step(plan(), step, FLOAT32, together).exposed_s == pytest.approx(1.0)


def test_a_thousand_ranks_send_a_thousand_messages() -> None:
    link = LinkSpeed(latency_s=1e-3, bandwidth_bytes_per_s=1e12, message_s=1e-3)
    many = predict_step(plan(), facts(6.0), FLOAT32, cluster(num_hosts=1000, link=link))
    assert many.exposed_s == pytest.approx(2 * 999e-3, rel=1e-3)


def test_blocks_exchange_once() -> None:
    blocks = Plan(schedule="blocks", codec="float32", bucket_bytes=1, block_steps=8)
    step = facts(6.0, 6.0)
    assert predict_step(blocks, step, FLOAT32, cluster()).seconds == pytest.approx(10.25)


def test_all_wait_for_the_slowest_and_less_where_they_may_be_late() -> None:
    step = replace(facts(1.0), deviations=(-0.1, 0.1))
    waits = [
        predict_step(replace(plan(schedule), block_steps=4), step, FLOAT32, cluster()).straggler_s
        for schedule in ("every_step", "double_buffering", "blocks")
    ]
    assert waits[0] == pytest.approx(0.5)  # of two draws three in four are the later one
    assert waits[1] == pytest.approx(0.5 / 2**0.5)
    assert waits[2] == pytest.approx(0.25)


def test_a_schedule_without_a_model_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="parameter_server"):
        predict_step(plan("parameter_server"), facts(1.0), FLOAT32, cluster())


# ---- two threads on the cores of a rank ----

CODE = Part(2.0, 2.0)
SEND = Part(4.0, 1.0)


def seconds(compute_s: float, part: Part, num_cores: float = 1.0) -> float:
    """An exchange beside a computation, then the wait for it."""
    simulation = StepSimulation(num_cores)
    simulation.start(0, [part])
    simulation.compute(compute_s)
    simulation.wait(0)
    return simulation.now_s


@pytest.mark.parametrize(("num_cores", "expected_s"), [(2.0, 6.0), (1.0, 8.0), (0.5, 16.0)])
def test_computation_of_both_threads_shares_the_cores(num_cores: float, expected_s: float) -> None:
    assert seconds(6.0, CODE, num_cores) == pytest.approx(expected_s)


def test_a_transfer_delays_by_what_it_needs_of_the_core() -> None:
    assert seconds(6.0, SEND) == pytest.approx(7.0)
    assert seconds(1.0, SEND) == pytest.approx(4.0)
    # the core is as busy as the link is with two ranks on it
    assert seconds(6.0, SEND, num_cores=0.5) == pytest.approx(14.0)


def test_exchanges_are_made_one_after_another() -> None:
    simulation = StepSimulation()
    simulation.start(0, [SEND])
    simulation.start(1, [SEND])
    simulation.wait(1)
    assert simulation.now_s == pytest.approx(8.0)
    simulation.wait(0)
    assert simulation.now_s == pytest.approx(8.0)


@pytest.mark.parametrize("seconds", [math.inf, math.nan])
def test_times_without_an_end_are_refused(seconds: float) -> None:
    for endless in (lambda: Part(seconds, 0.0), lambda: StepSimulation().compute(seconds)):
        with pytest.raises(UsageError, match="All facts must be finite"):
            endless()


# ---- the slowest of several ranks ----


@pytest.mark.parametrize("num_ranks", [2, 4, 16])
def test_as_drawing_shows(num_ranks: int) -> None:
    rng = random.Random(0)
    sample = [rng.gauss(0.0, 0.05) for _ in range(500)]
    drawn = [max(rng.choices(sample, k=num_ranks)) for _ in range(20_000)]
    assert expected_maximum(sample, num_ranks) == pytest.approx(statistics.mean(drawn), abs=0.002)


# ---- bytes and messages of a sum, by route: the bytes are those that test hosts have counted ----


@pytest.mark.parametrize(
    ("route", "num_hosts", "ranks_per_host", "megabytes"),
    [  # measured with 60 MB by bench_exchange.py
        ("hierarchical", 2, 1, 60.06),
        ("hierarchical", 4, 1, 90.20),
        ("hierarchical", 2, 2, 60.12),
        ("flat", 2, 2, 120.15),
    ],
)
def test_bytes_are_those_that_were_counted(
    route: str, num_hosts: int, ranks_per_host: int, megabytes: float
) -> None:
    across = crossing(route, num_hosts, ranks_per_host, is_encoded=False)
    assert across.share * 60 == pytest.approx(megabytes, rel=0.005)


def test_every_route_has_a_model() -> None:
    for route in set(ROUTES) - {"single_node"}:
        assert crossing(route, 1, 4, is_encoded=False).share == 0.0
        assert crossing(route, 4, 2, is_encoded=True).num_rounds >= 2


def test_refused() -> None:
    with pytest.raises(UsageError, match="one host, not 2"):
        crossing("single_node", 2, 1, is_encoded=False)
    with pytest.raises(UnknownNameError, match="hierarchical"):
        crossing("straight", 2, 1, is_encoded=False)
