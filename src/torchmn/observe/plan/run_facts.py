"""Derive the facts about a training from its recorded run.

The step without exchange is the recorded one without its waits for the exchange. What sending takes
from the core that computes shows in no phase: it is chosen such that the model's step is the
recorded one.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmn.base.errors import DataError
from torchmn.cluster.units import MiB
from torchmn.exchange.auto.predict import CodecFacts, ReadyGradient, crossing
from torchmn.observe.plan.facts import PAYLOAD_SHARE, Training, predict
from torchmn.observe.read.recorded_run import RankRecord
from torchmn.observe.read.run_reader import read_run
from torchmn.record.records import PHASES

_NOT_COMPUTED = ("exchange", "encode", "decode", "evaluation", "checkpoint")
_COMPUTED = [PHASES.index(phase) for phase in PHASES if phase not in _NOT_COMPUTED]
_PAUSES = [PHASES.index("evaluation"), PHASES.index("checkpoint")]
_NUM_WARM_UP = 5
_MIN_STEPS = 5
_MAX_DEVIATIONS = 1000
_MIN_LATENCY_S = 5e-6
_MAX_CORES = 2.0
_MAX_SEND_S_PER_BYTE = 20e-9
_NUM_HALVINGS = 20


def facts_of(path: Path) -> Training:
    """Return the facts of the run in a folder. Raises DataError: it has too few steps."""
    ranks = read_run(path).ranks
    rows = [_usable(rank) for rank in ranks]
    if min(int(np.sum(mask)) for mask in rows) < _MIN_STEPS:
        raise DataError(
            f"The run in {path} has fewer than {_MIN_STEPS + _NUM_WARM_UP} steps on some rank. "
            "Record 20 steps or more."
        )
    pairs = list(zip(ranks, rows, strict=True))
    phases = np.concatenate([rank.steps.phases[mask] for rank, mask in pairs]).astype(np.float64)
    seconds = np.concatenate([rank.steps.seconds[mask] for rank, mask in pairs])
    first, settings = ranks[0], ranks[0].settings
    on_host = [rank for rank in ranks if rank.start.host == first.start.host]
    num_cores = len({cpu for rank in on_host for cpu in rank.start.cpus}) or len(on_host)
    cores_per_rank = min(_MAX_CORES, num_cores / len(on_host))
    alone = phases * min(1.0, cores_per_rank)  # ranks that share a core take turns
    compute = alone[:, _COMPUTED].sum(axis=1)
    medians = np.median(alone, axis=0) / np.median(compute)
    backward_share = min(0.99, float(medians[PHASES.index("backward")]))
    hosts = 1 + max(rank.start.inter_rank for rank in ranks)
    samples = first.steps.samples[rows[0]]
    has_exchange = np.unique(first.steps.buckets.row)
    ordered = np.sort(compute) / np.median(compute) - 1
    thinned = np.linspace(0, len(ordered) - 1, min(len(ordered), _MAX_DEVIATIONS)).round()
    facts = Training(
        title=str(path),
        samples=max(1, int(np.median(samples))) if np.all(np.isfinite(samples)) else 1,
        compute_s=float(np.median(compute)),
        backward_share=backward_share,
        after_share=min(float(medians[PHASES.index("optimizer")]), 1 - backward_share),
        gradients=_gradients(ranks),
        deviations=tuple(ordered[thinned.astype(int)].tolist()),
        hosts=hosts,
        ranks_per_host=max(1, round(first.start.size / hosts)),
        cores_per_rank=cores_per_rank,
        route=settings.get("route", "hierarchical").split(" ")[0],
        schedule=settings.get("schedule", "every_step"),
        codec=settings.get("codec", "float32"),
        bucket_bytes=int(settings.get("bucket_bytes", 4 * MiB)),
        block_steps=int(np.median(np.diff(has_exchange))) if len(has_exchange) > 1 else 1,
    )
    rates = np.concatenate([_rates(rank, mask) for rank, mask in pairs])
    if hosts == 1 or not len(rates) or not facts.gradients:
        return facts
    step_s = float(np.mean(seconds - phases[:, _PAUSES].sum(axis=1)))
    return _with_link(facts, ranks, float(np.quantile(rates, 0.9)), step_s)


def _usable(rank: RankRecord) -> NDArray[np.bool_]:
    """Select steps that compute, but for the first ones and those that evaluate or save."""
    steps = rank.steps
    quiet = steps.phases[:, _PAUSES].sum(axis=1) < 0.01 * np.maximum(steps.seconds, 1e-9)
    first = rank.first_step + min(_NUM_WARM_UP, len(steps) // 3)
    has_computed = steps.phases[:, _COMPUTED].sum(axis=1) > 0
    return np.asarray((steps.step >= first) & quiet & has_computed)


def _gradients(ranks: Sequence[RankRecord]) -> tuple[ReadyGradient, ...]:
    """Return gradients with median times over the steps that recorded them; may be empty."""
    times = [each for rank in ranks for each in rank.gradient_times]
    if not times:
        return ()
    first = times[0]
    ready_s = np.median([each.ready_s for each in times if each.numel == first.numel], axis=0)
    columns = zip(ready_s.tolist(), first.numel, first.nbytes, first.is_small, strict=True)
    names = ("ready_s", "numel", "nbytes", "is_small")
    return tuple(ReadyGradient(**dict(zip(names, row, strict=True))) for row in columns)


def _rates(rank: RankRecord, mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the bytes per second that a rank sent in each step during exchanges."""
    buckets = rank.steps.buckets
    sent, busy_s = (
        np.bincount(buckets.row, weights=weights, minlength=len(mask))
        for weights in (buckets.sent_nbytes, buckets.ended_s - buckets.started_s)
    )
    has_sent = mask & (sent > 0) & (busy_s > 0)
    return np.asarray(sent[has_sent] / busy_s[has_sent])


def _with_link(
    facts: Training, ranks: Sequence[RankRecord], bandwidth: float, step_s: float
) -> Training:
    """Add the link, the codec and the cost of sending, as measured from the buckets."""
    columns = ("started_s", "ended_s", "sent_nbytes", "nbytes", "encode_s", "decode_s")
    started_s, ended_s, sent, held, encode_s, decode_s = (
        np.concatenate([getattr(rank.steps.buckets, name) for rank in ranks]) for name in columns
    )
    is_encoded = facts.codec != "float32"
    across = crossing(facts.route, facts.hosts, facts.ranks_per_host, is_encoded=is_encoded)
    waits = (ended_s - started_s - sent / bandwidth)[sent > 0]
    latency_s = float(min(waits[waits > 0], default=0.0)) / max(1, across.num_rounds)
    numel = sum(gradient.numel for gradient in facts.gradients if not gradient.is_small)
    numel *= sum(len(np.unique(rank.steps.buckets.row)) for rank in ranks)
    codecs = {}
    if is_encoded and numel and np.sum(encode_s) > 0:
        codecs[facts.codec] = CodecFacts(
            name=facts.codec,
            bits=32 * float(np.sum(sent) / np.sum(held)) / across.share,
            encode_s=float(np.sum(encode_s)) / numel,
            decode_s=float(np.sum(decode_s)) / numel / (2 - 1 / facts.hosts),
        )
    facts = msgspec.structs.replace(
        facts,
        rate=f"{bandwidth / PAYLOAD_SHARE * 8e-6:.1f}mbit",
        latency_s=max(_MIN_LATENCY_S, latency_s),
        codecs=codecs,
    )
    if is_encoded and not codecs:
        return facts
    low, high = 0.0, _MAX_SEND_S_PER_BYTE
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        tried = msgspec.structs.replace(facts, send_s_per_byte=middle)
        low, high = (low, middle) if predict(tried).seconds > step_s else (middle, high)
    return msgspec.structs.replace(facts, send_s_per_byte=low)
