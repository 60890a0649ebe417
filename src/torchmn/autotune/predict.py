"""Predict the time of a step with a codec, schedule and bucket size from measured times.

The exchange of one step is simulated. The backward pass makes gradients ready one after another; a
bucket is sent when its last gradient is ready and the previous bucket was sent:

    end_i  = max(ready_i, end_{i-1}) + transfer_i
    transfer = num_rounds latency + 2 (W - 1) / W bytes / bandwidth,   bytes = elements bits / 8

and encoding and decoding are added to the computation, which uses the same core:

    every_step                step = compute + coding + max(0, end_last - backward)
    every_step_next_forward   step = max(compute + coding, sum of transfers) + transfer of one chunk
    double_buffering          step = max(compute + coding, sum of transfers)

Predictions are tested by trials, see `tuner`. Everything here is a pure function of numbers that
are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchmn.communicators.link_speed import LinkSpeed
from torchmn.units import MiB

NUM_ROUNDS = 2  # to the owners of stripes and back
CHUNK_BYTES = MiB


@dataclass(frozen=True, kw_only=True)
class ReadyGradient:
    """A parameter whose gradient is ready ``ready_s`` after the start of the backward pass."""

    ready_s: float
    numel: int
    nbytes: int
    is_small: bool


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One training step of the slowest rank, in seconds, without waits for the exchange."""

    compute_s: float
    backward_s: float
    gradients: tuple[ReadyGradient, ...]
    """In the order in which they become ready."""


@dataclass(frozen=True, kw_only=True)
class CodecFacts:
    """A codec on this machine. ``coding_s`` encodes one element and decodes it twice."""

    name: str
    bits: float = 32.0
    coding_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A schedule, codec and bucket size."""

    schedule: str
    codec: str
    bucket_bytes: int

    def __str__(self) -> str:
        return f"{self.schedule}, {self.codec}, buckets of {self.bucket_bytes / MiB:g} MB"


def predict_step_s(
    plan: Plan, step: StepFacts, codec: CodecFacts, link: LinkSpeed | None, num_parts: int
) -> float:
    """Seconds of one step. ``num_parts`` ranks, or leaders, exchange over the link."""
    if link is None or num_parts < 2:
        return step.compute_s
    buckets = list(_buckets(step.gradients, plan.bucket_bytes))
    transfers, coding = [], []
    for bucket in buckets:
        nbytes = sum(
            gradient.nbytes * (1.0 if gradient.is_small else codec.bits / 32) for gradient in bucket
        )
        crossing = 2 * (num_parts - 1) / num_parts * nbytes
        transfers.append(link.seconds(crossing, NUM_ROUNDS))
        coding.append(sum(g.numel for g in bucket if not g.is_small) * codec.coding_s)
    busy_s = step.compute_s + sum(coding)
    if plan.schedule == "double_buffering":
        return max(busy_s, sum(transfers))
    if plan.schedule == "every_step_next_forward":
        total = sum(gradient.nbytes for gradient in step.gradients)
        return max(busy_s, sum(transfers)) + sum(transfers) * min(1.0, CHUNK_BYTES / total)
    end = coded = 0.0
    for bucket, transfer, code in zip(buckets, transfers, coding, strict=True):
        ready = max(gradient.ready_s for gradient in bucket) + coded
        coded += code
        end = max(ready, end) + code + transfer
    return busy_s + max(0.0, end - step.backward_s - coded)


def ranked(
    plans: Iterable[Plan],
    step: StepFacts,
    codecs: Sequence[CodecFacts],
    link: LinkSpeed | None,
    num_parts: int,
) -> list[tuple[float, Plan]]:
    """All plans with their predicted steps, the fastest first; the order of equals is kept."""
    by_name = {codec.name: codec for codec in codecs}
    predicted = [
        (predict_step_s(plan, step, by_name[plan.codec], link, num_parts), plan) for plan in plans
    ]
    return sorted(predicted, key=lambda item: item[0])


def shortlist(
    predictions: Sequence[tuple[float, Plan]], *, within: float, max_plans: int
) -> list[Plan]:
    """The plans to try: the best few, with the best bucket size of each schedule and codec."""
    best_s = predictions[0][0]
    chosen: dict[tuple[str, str], Plan] = {}
    for seconds, plan in predictions:
        if seconds <= within * best_s:
            chosen.setdefault((plan.schedule, plan.codec), plan)
    return list(chosen.values())[:max_plans]


def _buckets(
    gradients: Sequence[ReadyGradient], bucket_bytes: int
) -> Iterable[list[ReadyGradient]]:
    """Consecutive gradients of at least ``bucket_bytes``, but for the last; see `plan_buckets`."""
    bucket: list[ReadyGradient] = []
    nbytes = 0
    for gradient in gradients:
        bucket.append(gradient)
        nbytes += gradient.nbytes
        if nbytes >= bucket_bytes:
            yield bucket
            bucket, nbytes = [], 0
    if bucket:
        yield bucket
