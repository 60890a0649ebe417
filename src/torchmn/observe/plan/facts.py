"""The facts about a training and its cluster that a prediction needs, and the table that has them.

samples = 32                # of one rank in one step
compute_s = 0.640           # a step of one rank without exchange
parameters = 15_000_000
hosts = 2
rate = "10gbit"             # of the adapter of a host
latency_s = 50e-6
"""

import functools
import math
from dataclasses import replace
from pathlib import Path

import msgspec

from torchmn.base.errors import UsageError
from torchmn.cluster.network import rate_bytes_per_s
from torchmn.cluster.units import MiB
from torchmn.exchange.auto.predict import (
    Cluster,
    CodecFacts,
    LinkSpeed,
    Plan,
    ReadyGradient,
    StepFacts,
    model_of,
    predict_step,
)
from torchmn.exchange.auto.predict import PredictedStep as PredictedStep  # for who shows it

PAYLOAD_SHARE = 1448 / 1514  # share of an Ethernet frame, header included, that TCP carries
_NUM_GRADIENTS = 50


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about a training and where it runs. A cost that is None is unknown and counts as 0.

    ``gradients`` and ``codecs`` come from recorded runs. Without gradients the parameters have
    equal sizes, and their gradients become ready evenly during backward. ``cores_per_rank`` below
    1: several ranks share a core.
    """

    samples: int
    compute_s: float
    parameters: int = 0
    gradients: tuple[ReadyGradient, ...] = ()
    backward_share: float = 0.6
    after_share: float = 0.02
    deviations: tuple[float, ...] = ()
    hosts: int = 1
    ranks_per_host: int = 1
    cores_per_rank: float = 1.0
    rate: str | None = None
    latency_s: float | None = None
    node_bytes_per_s: float | None = None
    send_s_per_byte: float | None = None
    route: str = "hierarchical"
    schedule: str = "every_step"
    codec: str = "float32"
    codecs: dict[str, CodecFacts] = {}
    bucket_bytes: int = 4 * MiB
    block_steps: int = 16
    title: str = ""

    def __post_init__(self) -> None:
        for name in ("samples", "hosts", "ranks_per_host", "bucket_bytes", "block_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not (self.compute_s > 0 and self.cores_per_rank > 0):
            raise ValueError("compute_s and cores_per_rank must be above 0")
        if not 0 < self.backward_share + self.after_share <= 1:
            raise ValueError("backward_share + after_share must be above 0 and at most 1")

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all hosts."""
        return self.hosts * self.ranks_per_host


def predict(training: Training) -> PredictedStep:
    """Predict the step of a training.

    Raises UsageError: a fact is missing, or the model does not cover it.
    """
    if training.parameters < 1 and not training.gradients:
        raise UsageError(
            "Its gradients are not known. Record 20 steps or more of a training with a multi-node "
            "optimizer, or give parameters, their number, in the table."
        )
    plan = Plan(
        schedule=model_of(training.schedule),
        codec=training.codec,
        bucket_bytes=training.bucket_bytes,
        block_steps=training.block_steps,
    )
    cluster = Cluster(
        num_hosts=training.hosts,
        ranks_per_host=training.ranks_per_host,
        link=_link_of(training) if training.hosts > 1 else None,
        route=training.route,
        cores_per_rank=training.cores_per_rank,
        node_bytes_per_s=training.node_bytes_per_s,
        send_s_per_byte=training.send_s_per_byte or 0.0,
    )
    codec = CodecFacts(name="float32")
    if training.codec != "float32":
        codec = training.codecs.get(training.codec) or timed_codec(training.codec)
    return predict_step(plan, _step_of(training), codec, cluster)


@functools.cache
def timed_codec(name: str) -> CodecFacts:
    """Time a codec on one core of this machine.

    Raises UnknownNameError, UsageError: there is no such codec, or it cannot be timed by itself.
    """
    import torch

    from torchmn.exchange.auto import tuner

    torch.set_num_threads(1)
    codec = tuner.timed_codec(name, torch.device("cpu"))
    if codec.encode_s == math.inf:
        raise UsageError(f"The codec {name} cannot be timed by itself: record a run with it.")
    return codec


def read_table(path: Path) -> Training:
    """Read a TOML file. Raises UsageError: it cannot be read, or is not the table of a training."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Training)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{path} does not have the table of a training: {error}. `python -m pydoc "
            "torchmn.observe.plan.facts` shows an example."
        ) from None


def _link_of(training: Training) -> LinkSpeed:
    if training.rate is None or training.latency_s is None:
        raise UsageError(
            f"{training.hosts} hosts cannot be predicted: no link is known. Record a run with "
            "several hosts, or add rate and latency_s to the table."
        )
    return LinkSpeed(
        latency_s=training.latency_s,
        bandwidth_bytes_per_s=rate_bytes_per_s(training.rate) * PAYLOAD_SHARE,
        message_s=training.latency_s / 2,
    )


def _step_of(training: Training) -> StepFacts:
    """Return the step of a typical rank."""
    backward_s = training.compute_s * training.backward_share
    gradients = training.gradients
    if not gradients:
        numel = math.ceil(training.parameters / _NUM_GRADIENTS)
        gradients = tuple(
            ReadyGradient(ready_s=i + 1, numel=numel, nbytes=4 * numel, is_small=False)
            for i in range(_NUM_GRADIENTS)
        )
    scale = backward_s / max(*(gradient.ready_s for gradient in gradients), 1e-12)
    return StepFacts(
        compute_s=training.compute_s,
        backward_s=backward_s,
        gradients=tuple(
            replace(gradient, ready_s=gradient.ready_s * scale)
            for gradient in sorted(gradients, key=lambda gradient: gradient.ready_s)
        ),
        after_s=training.compute_s * training.after_share,
        deviations=training.deviations,
    )
