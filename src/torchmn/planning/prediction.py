"""One setting predicted, with error bars, and what the prediction leaves out.

The bars combine what each uncertain number does to the prediction: the square root of the sum of
squares, separately upwards and downwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchmn.autotune.predict import (
    Cluster,
    CodecFacts,
    ExchangeCosts,
    Plan,
    PredictedStep,
    StepFacts,
    predict_step,
)
from torchmn.errors import UsageError
from torchmn.planning.description import Description, Setting, schedule_of

MODEL_ERROR = 0.05
"""Of the model itself: about the median error over the recorded runs of bench_exchange.py."""
NOMINAL_ERROR = 0.1
"""Of a bandwidth that was derived from a rate instead of measured."""
UNKNOWN_SEND_S_PER_BYTE = 1.5e-9
UNKNOWN_NODE_BYTES_PER_S = 4e9
_MIN_COMPUTE_ERROR = 0.01


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted step: seconds with error bars, its parts, and what was left out."""

    setting: Setting
    samples: int
    alone_s: float
    """A step of one rank without exchange, on a core of its own."""
    step: PredictedStep
    low_s: float
    high_s: float
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.step.seconds

    @property
    def samples_per_s(self) -> float:
        """Of all ranks."""
        return self.setting.num_ranks * self.samples / self.seconds

    @property
    def efficiency(self) -> float:
        """Speed of a rank as a share of its speed alone."""
        return self.alone_s / self.seconds

    @property
    def speed_up(self) -> float:
        """Over one rank."""
        return self.setting.num_ranks * self.efficiency


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """The arguments of `predict_step`."""

    plan: Plan
    step: StepFacts
    codec: CodecFacts
    cluster: Cluster

    def seconds(self) -> float:
        """Of the predicted step."""
        return predict_step(self.plan, self.step, self.codec, self.cluster).seconds


def predict_setting(known: Description, setting: Setting) -> Prediction:
    """Predict one setting. Raises UsageError: there is no data for it, or it is impossible."""
    _check(setting)
    batch = known.compute_of(setting.samples)
    inputs = inputs_of(known, setting)
    step = predict_step(inputs.plan, inputs.step, inputs.codec, inputs.cluster)
    below = above = 0.0
    for varied in _variations(known, setting, inputs):
        difference = varied.seconds() - step.seconds
        below += min(0.0, difference) ** 2
        above += max(0.0, difference) ** 2
    own = 0.0 if setting.num_ranks == 1 else MODEL_ERROR * step.seconds
    return Prediction(
        setting=setting,
        samples=batch.samples,
        alone_s=inputs.step.compute_s,
        step=step,
        low_s=step.seconds - math.sqrt(below + own**2),
        high_s=step.seconds + math.sqrt(above + own**2),
        notes=tuple(_notes(known, setting)),
    )


def _check(setting: Setting) -> None:
    for name in ("hosts", "ranks_per_host", "block_steps", "bucket_bytes"):
        if getattr(setting, name) < 1:
            raise UsageError(f"{name}={getattr(setting, name)} must be 1 or more.")
    if not setting.cores_per_rank > 0:
        raise UsageError(f"cores_per_rank={setting.cores_per_rank} must be above 0.")
    if not 0 <= setting.overlap_steps < setting.block_steps:
        raise UsageError(
            f"overlap_steps={setting.overlap_steps} must be 0 or more and less than "
            f"block_steps={setting.block_steps}."
        )


def inputs_of(known: Description, setting: Setting) -> ModelInputs:
    """What the model needs. Raises UsageError: there is no data for it."""
    link = known.link_of(setting.rate)
    if setting.hosts > 1 and link is None:
        raise UsageError(
            f"{setting.hosts} hosts cannot be predicted: no link is known. Record a run with "
            "several hosts, or add [link] with rate and latency_s to the description."
        )
    return ModelInputs(
        plan=Plan(
            schedule=schedule_of(setting.schedule),
            codec=setting.codec,
            bucket_bytes=setting.bucket_bytes,
            block_steps=setting.block_steps,
            overlap_steps=setting.overlap_steps,
        ),
        step=known.step_of(setting.samples),
        codec=known.codec_of(setting.codec),
        cluster=Cluster(
            num_hosts=setting.hosts,
            ranks_per_host=setting.ranks_per_host,
            link=link,
            route=setting.route,
            cores_per_rank=setting.cores_per_rank,
            node_bytes_per_s=known.node_bytes_per_s,
            costs=known.costs_of(),
        ),
    )


def _variations(known: Description, setting: Setting, inputs: ModelInputs) -> Iterator[ModelInputs]:
    """The inputs with one number at an end of its error bar."""
    step, codec, cluster = inputs.step, inputs.codec, inputs.cluster
    batch = known.compute_of(setting.samples)
    error = max(batch.error_s / batch.compute_s, _MIN_COMPUTE_ERROR)
    for factor in (1 - error, 1 + error):
        yield replace(inputs, step=replace(step, compute_s=factor * step.compute_s,
                                           backward_s=factor * step.backward_s))  # fmt: skip
    if setting.num_ranks == 1:
        return
    if known.deviations and setting.num_ranks > len(known.deviations):
        yield replace(inputs, step=replace(step, deviations=tuple(2 * d for d in step.deviations)))
    if setting.codec != "float32":
        error = known.codecs[setting.codec].error
        for factor in (1 - error, 1 + error):
            faster = replace(
                codec, encode_s=factor * codec.encode_s, decode_s=factor * codec.decode_s
            )
            yield replace(inputs, codec=faster)
    for varied in _cluster_variations(known, setting, cluster):
        yield replace(inputs, cluster=varied)


def _cluster_variations(
    known: Description, setting: Setting, cluster: Cluster
) -> Iterator[Cluster]:
    link, costs = cluster.link, cluster.costs
    if cluster.ranks_per_host > 1 and known.node_bytes_per_s is None:
        yield replace(cluster, node_bytes_per_s=UNKNOWN_NODE_BYTES_PER_S)
    if link is None or known.link is None or cluster.num_hosts == 1:
        return
    is_measured = known.link.bandwidth_bytes_per_s and setting.rate in (None, known.link.rate)
    error = known.link.error if is_measured else max(known.link.error, NOMINAL_ERROR)
    for factor in (1 - error, 1 + error):
        bandwidth = factor * link.bandwidth_bytes_per_s
        yield replace(cluster, link=replace(link, bandwidth_bytes_per_s=bandwidth))
    if known.link.message_s is None:
        for message_s in (0.0, link.latency_s):
            yield replace(cluster, link=replace(link, message_s=message_s))
    if known.costs is None:
        yield replace(cluster, costs=ExchangeCosts(send_s_per_byte=UNKNOWN_SEND_S_PER_BYTE))
        return
    for factor in (1 - known.costs.error, 1 + known.costs.error):
        scaled = ExchangeCosts(
            pack_s_per_byte=factor * costs.pack_s_per_byte,
            send_s_per_byte=factor * costs.send_s_per_byte,
            interference=factor * costs.interference,
            wake_s=factor * costs.wake_s,
        )
        yield replace(cluster, costs=scaled)


def _notes(known: Description, setting: Setting) -> Iterator[str]:
    """What the numbers do not contain."""
    if setting.num_ranks == 1:
        return
    if not known.deviations:
        yield "no distribution of step times is known: waits for the slowest rank are not included"
    elif setting.num_ranks > len(known.deviations):
        yield (
            f"the slowest of {setting.num_ranks} ranks is estimated from {len(known.deviations)} "
            "recorded steps: rarer delays are not included"
        )
    if known.costs is None and setting.hosts > 1:
        yield "what sending takes from the cores was not measured and counts as free"
    if setting.ranks_per_host > 1 and known.node_bytes_per_s is None:
        yield "sums within a host were not measured and count as free"
    if known.gradients is None:
        yield "gradients are taken to become ready evenly during backward"
