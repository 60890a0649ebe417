"""Predict the time of a step from measured times: the model of `auto` and of ``torchmn plan``.

Some steps of a training are simulated (`StepSimulation`). Backward makes gradients ready one after
another; a bucket is exchanged when its last gradient is ready and the exchange of the previous
bucket is complete. An exchange of n elements in N bytes with a codec of b bits is

    encode n;   a round of N b / 32 share / 2 bytes;   sum the parts and encode the sum;
    a second round;   decode n

with ``share`` of the route (`crossing`), and each round takes its latency, a time per message and
its bytes over the bandwidth of the adapter, for which the ranks of a host compete. The schedules
wait:

    every_step          at the end of backward for all of its exchanges
    double_buffering    at the end of backward for the exchanges of the step before
    blocks              after block_steps steps for one exchange

The wait for the slowest rank is added to the simulated step of a typical rank (`waiting_share`).

Everything here is a pure function of numbers. Times that were not measured are None or 0 and count
as free; `torchmn.observe.plan` says so where it matters.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from torchmn.base.errors import UsageError, raise_if_unknown
from torchmn.base.names import ROUTE_TRAITS, SCHEDULE_TRAITS, Model
from torchmn.cluster.units import MiB
from torchmn.comm.codecs.codec_timing import CodecSpeed
from torchmn.comm.link_speed import LinkSpeed as LinkSpeed  # a part of `Cluster`

SCHEDULES: tuple[Model, ...] = get_args(Model)
_NUM_STEPS = 4  # simulated, of which the last is in the steady state


@dataclass(frozen=True, kw_only=True)
class ReadyGradient:
    """A parameter whose gradient is ready ``ready_s`` after the start of the backward pass."""

    ready_s: float
    numel: int
    nbytes: int
    is_small: bool


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """The times of a training step of the slowest rank, without waits for the exchange."""

    compute_s: float
    backward_s: float
    gradients: tuple[ReadyGradient, ...]  # in the order in which they become ready
    after_s: float = 0.0  # the part of ``compute_s`` after backward: the optimizer
    # Deviations of single steps of all ranks from ``compute_s``, as fractions of it.
    deviations: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CodecFacts(CodecSpeed):
    """The speed of a codec on this machine, by its name."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts on which a training runs.

    ``cores_per_rank`` is below 1 if several ranks share a core. ``link`` is the network adapter of
    a host, None if unknown. ``node_bytes_per_s`` is the rate of a sum within a host, None if it
    counts as free. ``send_s_per_byte`` is the processor time of a rank for each byte that it sends
    to another host, including the receipt of as much.
    """

    num_hosts: int
    ranks_per_host: int = 1
    link: LinkSpeed | None = None
    route: str = "hierarchical"
    cores_per_rank: float = 1.0
    node_bytes_per_s: float | None = None
    send_s_per_byte: float = 0.0

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.num_hosts * self.ranks_per_host


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A schedule, codec and bucket size.

    ``block_steps`` is the length of a block in steps, see `LocalUpdateSchedule`.
    """

    schedule: str
    codec: str
    bucket_bytes: int
    block_steps: int = 1

    def __str__(self) -> str:
        return f"{self.schedule}, {self.codec}, buckets of {self.bucket_bytes / MiB:g} MB"


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The predicted parts of a step's time."""

    compute_s: float
    coding_s: float  # delay of the training thread by codecs and sending, which use its core
    exposed_s: float  # waits for the exchange
    straggler_s: float  # waits for slower ranks

    @property
    def seconds(self) -> float:
        """The time of the whole step: the sum of the parts."""
        return self.compute_s + self.coding_s + self.exposed_s + self.straggler_s


def model_of(schedule: str) -> Model:
    """The model by which a schedule is predicted. Raises UsageError: there is none."""
    known = {name: traits.model for name, traits in SCHEDULE_TRAITS.items() if traits.model}
    if schedule not in known:
        raise UsageError(
            f"No prediction model for schedule {schedule!r}: there is one for {', '.join(known)}."
        )
    return known[schedule]


def predict_step(plan: Plan, step: StepFacts, codec: CodecFacts, cluster: Cluster) -> PredictedStep:
    """Predict the mean step of a long training.

    Raises UnknownNameError: the schedule or route is not known; UsageError: the route does not suit
    the cluster, or a time is not finite.
    """
    raise_if_unknown("schedule", plan.schedule, SCHEDULES)
    compute_s = step.compute_s / min(1.0, cluster.cores_per_rank)
    if cluster.size == 1 or (cluster.num_hosts > 1 and cluster.link is None):
        return PredictedStep(compute_s=compute_s, coding_s=0.0, exposed_s=0.0, straggler_s=0.0)
    exchange = _Exchange(codec, cluster)
    num_cores = cluster.cores_per_rank
    seconds = _steady_s(plan, step, exchange, num_cores)
    # Without the link only the work of the cores remains; the difference is the exposed wait.
    busy_s = _steady_s(plan, step, _Exchange(codec, replace(cluster, link=None)), num_cores)
    num_late = {"double_buffering": 2, "blocks": plan.block_steps}.get(plan.schedule, 1)
    share = waiting_share(step.deviations, cluster.size, num_late)
    return PredictedStep(
        compute_s=compute_s,
        coding_s=busy_s - compute_s,
        exposed_s=max(0.0, seconds - busy_s),
        straggler_s=share * compute_s,
    )


def predict_step_s(
    plan: Plan, step: StepFacts, codec: CodecFacts, link: LinkSpeed | None, num_parts: int
) -> float:
    """Seconds of a step in which ``num_parts`` ranks, or leaders of nodes, exchange over a link."""
    return predict_step(plan, step, codec, Cluster(num_hosts=num_parts, link=link)).seconds


def ranked(
    plans: Iterable[Plan],
    step: StepFacts,
    codecs: Sequence[CodecFacts],
    link: LinkSpeed | None,
    num_parts: int,
) -> list[tuple[float, Plan]]:
    """All plans with their predicted seconds, the fastest first; ties keep their order.

    Plans with a codec that cannot be timed, whose times are infinite, have no prediction and come
    last.
    """
    by_name = {codec.name: codec for codec in codecs}

    def predicted_s(plan: Plan) -> float:
        codec = by_name[plan.codec]
        is_timed = codec.encode_s + codec.decode_s < math.inf
        return predict_step_s(plan, step, codec, link, num_parts) if is_timed else math.inf

    return sorted(((predicted_s(plan), plan) for plan in plans), key=lambda item: item[0])


def shortlist(
    predictions: Sequence[tuple[float, Plan]], *, within: float, max_plans: int
) -> list[Plan]:
    """The plans to try: the best few, with the best bucket size of each schedule and codec.

    Plans without a prediction are tried only if there are no others.
    """
    best_s = predictions[0][0]
    chosen: dict[tuple[str, str], Plan] = {}
    for seconds, plan in predictions:
        if seconds <= within * best_s:
            chosen.setdefault((plan.schedule, plan.codec), plan)
    return list(chosen.values())[:max_plans]


# ---- one exchange ----


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    """Gradients that are exchanged together."""

    ready_s: float
    numel: float  # elements of the gradients that are encoded
    nbytes: float
    small_nbytes: float  # bytes of small gradients, which are not encoded


class _Exchange:
    """Computes the parts of the exchange of a bucket."""

    def __init__(self, codec: CodecFacts, cluster: Cluster) -> None:
        self._codec, self._cluster = codec, cluster
        is_encoded = codec.bits != 32.0 or codec.encode_s > 0
        self._crossing: Crossing = crossing(
            cluster.route, cluster.num_hosts, cluster.ranks_per_host, is_encoded=is_encoded
        )

    def parts(self, bucket: _Bucket) -> list[Part]:
        """The parts that the exchange thread performs, one after the other."""
        codec, cluster, across = self._codec, self._cluster, self._crossing
        node_rate = cluster.node_bytes_per_s if cluster.ranks_per_host > 1 else None
        in_node = _coded(bucket.nbytes / node_rate / 2 if node_rate else 0.0)
        if not across.num_rounds:
            return [in_node, in_node]
        encode_s, decode_s = bucket.numel * codec.encode_s, bucket.numel * codec.decode_s
        num_parts = max(2, cluster.num_hosts)
        transfer = self._transfer(bucket)
        return [
            in_node,
            _coded(encode_s * (num_parts - 1) / num_parts),
            transfer,
            _coded(decode_s * (num_parts - 1) / num_parts + encode_s / num_parts),
            transfer,
            _coded(decode_s),
            in_node,
        ]

    def _transfer(self, bucket: _Bucket) -> Part:
        """Half of the transfer over the adapter; both halves take equally long."""
        cluster, across, link = self._cluster, self._crossing, self._cluster.link
        sent = across.share * (bucket.small_nbytes + (bucket.nbytes - bucket.small_nbytes) * (
            self._codec.bits / 32
        ))  # fmt: skip
        senders = 1 if cluster.route == "hierarchical" else cluster.ranks_per_host
        cpu_s = sent / senders * cluster.send_s_per_byte
        duration_s = 0.0
        if link is not None:
            duration_s = link.seconds(sent, across.num_rounds)
            duration_s += (across.num_messages - across.num_rounds) * link.message_s
        return Part(duration_s / 2, cpu_s / 2)


def _coded(seconds: float) -> Part:
    return Part(seconds, seconds)


# ---- the training thread ----


def _steady_s(plan: Plan, step: StepFacts, exchange: _Exchange, num_cores: float) -> float:
    """Seconds of a step in the steady state, once exchanges of earlier steps are under way."""
    simulation = StepSimulation(num_cores)
    buckets = list(_buckets(step.gradients, plan.bucket_bytes))
    if plan.schedule == "blocks":  # nothing of a block overlaps with the next one
        simulation.compute(plan.block_steps * step.compute_s)
        for index, bucket in enumerate(buckets):
            simulation.start(index, exchange.parts(bucket))
        for index in range(len(buckets)):
            simulation.wait(index)
        return simulation.now_s / plan.block_steps
    num_late = int(plan.schedule == "double_buffering")
    began_s = 0.0
    for number in range(_NUM_STEPS):
        began_s = simulation.now_s
        simulation.compute(step.compute_s - step.backward_s - step.after_s)
        done_s = 0.0
        for index, bucket in enumerate(buckets):
            ready_s = min(bucket.ready_s, step.backward_s)
            simulation.compute(ready_s - done_s)
            done_s = max(done_s, ready_s)
            simulation.start((number, index), exchange.parts(bucket))
        simulation.compute(step.backward_s - done_s)
        for index in range(len(buckets)):
            simulation.wait((number - num_late, index))
        simulation.compute(step.after_s)
    return simulation.now_s - began_s


# ---- buckets ----


def _buckets(gradients: Sequence[ReadyGradient], bucket_bytes: int) -> Iterator[_Bucket]:
    """Buckets of at least ``bucket_bytes``, except the last one.

    That the first ones are smaller, see `plan_buckets`, is left out: plans differ in it by little.
    """
    members: list[ReadyGradient] = []
    for gradient in gradients:
        members.append(gradient)
        if sum(member.nbytes for member in members) >= bucket_bytes:
            yield _bucket_of(members)
            members = []
    if members:
        yield _bucket_of(members)


def _bucket_of(members: Sequence[ReadyGradient]) -> _Bucket:
    return _Bucket(
        ready_s=max(member.ready_s for member in members),
        numel=sum(member.numel for member in members if not member.is_small),
        nbytes=sum(member.nbytes for member in members),
        small_nbytes=sum(member.nbytes for member in members if member.is_small),
    )


# Bytes that cross a host's network adapter when a buffer is summed, by route.
#
#     N bytes, H hosts with k ranks each, W = H k ranks           bytes per adapter and direction
#     hierarchical, two_dimensional                               2 (H - 1) / H  N
#     flat, naive, non_cuda_aware: stripes at their owners        2 k (W - k) / W  N
#     pure_nccl: a ring over all ranks                            2 (W - 1) / W  N
#     pure_nccl, encoded: as hierarchical
#     single_node                                                 0
#
# Several ranks of a host that send at once share the adapter: the numbers above are for all of
# them. Sums at the owners of stripes take two rounds in which a rank sends to all others; a ring
# takes 2 (W - 1) rounds.


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The network traffic of the sum of one buffer.

    ``share`` times its bytes cross each adapter in each direction.
    """

    share: float
    num_rounds: int  # number of messages that wait for each other
    num_messages: int  # number of messages that a rank sends; those of a round to different ranks


def crossing(route: str, num_hosts: int, ranks_per_host: int, *, is_encoded: bool) -> Crossing:
    """The traffic of a route, see the table above.

    Raises UnknownNameError: there is no such route; UsageError: single_node with several hosts.
    """
    raise_if_unknown("route", route, ROUTE_TRAITS)
    traffic, size = ROUTE_TRAITS[route].traffic, num_hosts * ranks_per_host
    if traffic == "ring" and is_encoded:
        traffic = "nodes"
    if traffic == "none" and num_hosts > 1:
        raise UsageError(f"The route single_node is for one host, not {num_hosts}.")
    if num_hosts == 1:
        return Crossing(share=0.0, num_rounds=0, num_messages=0)
    if traffic == "ring":
        num_rounds = 2 * (size - 1)
        return Crossing(share=num_rounds / size, num_rounds=num_rounds, num_messages=num_rounds)
    num_parts = num_hosts if traffic == "nodes" else size
    swaps = num_parts == 2 and not is_encoded  # both send all they have, see `TcpTransport`
    if traffic == "nodes":
        share = 2 * (num_hosts - 1) / num_hosts
    else:
        share = 2 * ranks_per_host * (size - ranks_per_host) / size
    num_messages = 1 if swaps else 2 * (num_parts - 1)
    return Crossing(share=share, num_rounds=1 if swaps else 2, num_messages=num_messages)


# What a step loses to the slowest rank, from the distribution of step times.
#
#     every step                  all ranks wait for the slowest of W in each step: E max of W draws
#     double buffering            a rank may be a step late: E max of means over 2 steps
#     blocks of H steps           ranks wait once per block: E max of means over H steps
#
# The draws are deviations from the median step, measured on all recorded ranks. A mean over n steps
# deviates 1 / sqrt(n) as much. Pure functions of numbers.


def expected_maximum(values: Sequence[float], num_draws: int) -> float:
    """The expected maximum of ``num_draws`` independent draws from a sample.

    With many draws it tends to the largest value: the sample contains no rarer events.

    >>> expected_maximum([0.0, 1.0], 2)
    0.75
    """
    ordered = sorted(values)
    num = len(ordered)
    return sum(
        value * ((rank / num) ** num_draws - ((rank - 1) / num) ** num_draws)
        for rank, value in enumerate(ordered, 1)
    )


def waiting_share(deviations: Sequence[float], num_ranks: int, num_independent: float) -> float:
    """The wait for the slowest rank in a mean step, as a fraction of the typical step.

    Args:
        deviations: deviations of single steps from the typical one, as fractions of it.
        num_ranks: number of ranks that wait for each other.
        num_independent: number of steps over which a rank may be late before the others wait.
    """
    if num_ranks < 2 or len(deviations) < 2:
        return 0.0
    mean = math.fsum(deviations) / len(deviations)
    excess = expected_maximum(deviations, num_ranks) - mean
    return max(0.0, excess) / math.sqrt(num_independent)


# Simulation of a training thread and an exchange thread on the cores that a rank has.
#
# The training thread computes, starts exchanges and waits for them; the exchange thread does them
# one after another. Each part of an exchange lasts at least ``duration_s`` (bytes on the link, or
# its computation) and needs ``cpu_s`` of a core. If there are too few cores for both threads they
# share them, in equal parts unless one needs less than that: the time that an exchange takes from
# the core delays the training thread by as much, unless that thread waits meanwhile.
#
# Pure functions of numbers.

_NEGLIGIBLE_S = 1e-12


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an exchange: a transfer or a computation."""

    duration_s: float
    cpu_s: float

    def __post_init__(self) -> None:
        _raise_if_endless(self.duration_s, self.cpu_s)


def _raise_if_endless(*seconds: float) -> None:
    """Raise UsageError if a time is not finite: the simulation would never end."""
    if not all(map(math.isfinite, seconds)):
        raise UsageError(
            f"A step cannot be predicted from times of {seconds}. All facts must be finite, and a "
            "codec that cannot be timed by itself has no prediction: record a run with it."
        )


class StepSimulation:
    """Simulates a training thread that computes, starts exchanges and waits for them.

    `now_s` is the simulated time. ``num_cores`` is the number of cores that the threads of a rank
    share, below 1 if several ranks share a core.
    """

    def __init__(self, num_cores: float = 1.0) -> None:
        self.now_s = 0.0
        self._num_cores = num_cores
        # Started and not complete, in order; the first one is in progress.
        self._exchanges: dict[object, deque[Part]] = {}
        self._left_s = 0.0  # remaining time of the part in progress; 0 before it begins

    def compute(self, seconds: float) -> None:
        """Let the training thread compute for ``seconds`` of a core; does nothing if negative."""
        _raise_if_endless(seconds)
        while seconds > _NEGLIGIBLE_S:
            seconds -= self._advance(seconds)

    def start(self, key: object, parts: Iterable[Part]) -> None:
        """Hand an exchange of at least one part to the exchange thread."""
        self._exchanges[key] = deque(parts)

    def wait(self, key: object) -> None:
        """Let the training thread wait for an exchange; returns at once if it was not started."""
        while key in self._exchanges:
            self._advance(None)

    def _advance(self, compute_s: float | None) -> float:
        """Advance the time until one of the threads finishes its current work.

        ``compute_s`` is the work of the training thread, None if it waits. Returns how much of it
        was done.
        """
        key = next(iter(self._exchanges), None)
        parts = self._exchanges.get(key)
        if parts and self._left_s == 0.0:
            self._left_s = max(parts[0].duration_s, parts[0].cpu_s, _NEGLIGIBLE_S)
        rate, part_rate = self._rates(
            parts[0] if parts else None, is_computing=compute_s is not None
        )
        spans = [] if compute_s is None else [compute_s / rate]
        if parts:
            spans.append(self._left_s / part_rate)
        span_s = min(spans)
        self.now_s += span_s
        if parts:
            self._left_s -= span_s * part_rate
            if self._left_s <= _NEGLIGIBLE_S:
                self._left_s = 0.0
                parts.popleft()
                if not parts:
                    del self._exchanges[key]
        return span_s * rate

    def _rates(self, part: Part | None, *, is_computing: bool) -> tuple[float, float]:
        """The speeds of the training thread and of the part in progress; 1 is full speed."""
        num = self._num_cores
        if part is None:
            return min(1.0, num), 1.0
        needed = part.cpu_s / max(part.duration_s, part.cpu_s, _NEGLIGIBLE_S)
        if not is_computing:
            return 0.0, min(1.0, num / needed) if needed else 1.0
        given = min(needed, max(num / 2, num - 1.0))
        return min(1.0, num - given), given / needed if needed else 1.0
