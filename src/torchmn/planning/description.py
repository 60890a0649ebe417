"""What is known of a training and its cluster, as a file of TOML or JSON says it.

title = "VGG-16 on CIFAR-10"
backward_share = 0.6                # of the time of a step
parameters = 15_000_000             # or [gradients], as recorded

[[batches]]                         # a step of one rank without exchange, per batch size
samples = 32
compute_s = 0.640

[link]                              # the adapter of a host
rate = "10gbit"
latency_s = 50e-6

[codecs.int8]                       # per element
bits = 8
encode_s = 0.6e-9
decode_s = 0.3e-9

[setting]                           # what options of the command replace
hosts = 2
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from torchmn.autotune.predict import (
    SCHEDULES,
    CodecFacts,
    ExchangeCosts,
    ReadyGradient,
    StepFacts,
)
from torchmn.communicators.link_speed import LinkSpeed
from torchmn.errors import UsageError
from torchmn.units import MiB

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAYLOAD_SHARE = 1448 / 1514
"""Of a frame of Ethernet, header included, what TCP carries."""
LOCAL_UPDATES = ("periodic_average", "block_momentum", "diloco")
_NUM_GRADIENTS = 50
_FACTORS = {"k": 1e3, "m": 1e6, "g": 1e9}


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class BatchTime(_Part, frozen=True, kw_only=True):
    """One step of one rank with a core of its own and without exchange; its standard error."""

    samples: int
    compute_s: float
    error_s: float = 0.0


class Gradients(_Part, frozen=True, kw_only=True):
    """One entry per parameter, as in `torchmn.profiling.records.GradientTimes`."""

    ready_s: list[float]
    numel: list[int]
    nbytes: list[int]
    is_small: list[bool]


class Link(_Part, frozen=True, kw_only=True):
    """The adapter of a host. ``bandwidth_bytes_per_s`` is of payload, by default the rate's.

    ``message_s`` is what each further message takes that is sent at once; ``error`` is relative.
    """

    latency_s: float
    rate: str | None = None
    bandwidth_bytes_per_s: float | None = None
    message_s: float | None = None
    error: float = 0.05

    def __post_init__(self) -> None:
        if self.rate is None and self.bandwidth_bytes_per_s is None:
            raise ValueError("[link] needs a rate such as '10gbit', or bandwidth_bytes_per_s")


class CodecTime(_Part, frozen=True, kw_only=True):
    """Bits sent per element, and seconds of a core to encode and to decode one."""

    bits: float
    encode_s: float
    decode_s: float
    error: float = 0.1


class Costs(_Part, frozen=True, kw_only=True):
    """See `torchmn.autotune.predict.ExchangeCosts`; ``error`` is relative."""

    pack_s_per_byte: float = 0.0
    send_s_per_byte: float = 0.0
    interference: float = 0.0
    wake_s: float = 0.0
    error: float = 0.3


class Setting(_Part, frozen=True, kw_only=True):
    """Where and how to train. ``cores_per_rank`` below 1: several ranks share a core.

    ``rate`` is of the adapters, None for the measured one; ``samples`` of one rank in one step,
    None for the first batch.
    """

    hosts: int = 1
    ranks_per_host: int = 1
    cores_per_rank: float = 1.0
    rate: str | None = None
    route: str = "hierarchical"
    schedule: str = "every_step"
    codec: str = "float32"
    samples: int | None = None
    bucket_bytes: int = 4 * MiB
    block_steps: int = 16
    overlap_steps: int = 0

    @property
    def num_ranks(self) -> int:
        """On all hosts."""
        return self.hosts * self.ranks_per_host


class Description(_Part, frozen=True, kw_only=True):
    """All that is known. ``deviations``: of single steps from the typical one, as shares of it."""

    batches: list[BatchTime]
    parameters: int | None = None
    gradients: Gradients | None = None
    backward_share: float = 0.6
    after_share: float = 0.02
    link: Link | None = None
    codecs: dict[str, CodecTime] = {}
    costs: Costs | None = None
    node_bytes_per_s: float | None = None
    deviations: list[float] = []
    setting: Setting = Setting()
    title: str = ""

    def __post_init__(self) -> None:
        if not self.batches:
            raise ValueError("[[batches]] needs at least one entry")
        if any(b.samples < 1 or not b.compute_s > 0 for b in self.batches):
            raise ValueError("[[batches]]: samples and compute_s must be above 0")
        if (self.parameters is None) == (self.gradients is None):
            raise ValueError("give either parameters, their number, or [gradients]")
        if not 0 < self.backward_share + self.after_share <= 1:
            raise ValueError("backward_share + after_share must be above 0 and at most 1")

    # ---- the facts of the model ----

    def compute_of(self, samples: int | None) -> BatchTime:
        """The time of a step with this batch size.

        Between measured sizes, and to twice the largest, a line through the nearest two is taken.
        Raises UsageError: there is no data for it.
        """
        known = sorted({b.samples: b for b in self.batches}.values(), key=lambda b: b.samples)
        if samples is None:
            return self.batches[0]
        for batch in known:
            if batch.samples == samples:
                return batch
        sizes = ", ".join(str(batch.samples) for batch in known)
        if len(known) < 2 or not known[0].samples <= samples <= 2 * known[-1].samples:
            raise UsageError(
                f"No step with {samples} samples can be predicted: measured were {sizes}. A step "
                "need not take proportionally longer with more samples. Record short runs with two "
                "batch sizes, of which the larger is at least half as large."
            )
        upper = next((i for i, b in enumerate(known) if b.samples > samples), len(known) - 1)
        low, high = known[upper - 1], known[upper]
        part = (samples - low.samples) / (high.samples - low.samples)
        distance = max(part, 1.0) if part >= 0 else 1.0 - part
        return BatchTime(
            samples=samples,
            compute_s=low.compute_s + part * (high.compute_s - low.compute_s),
            error_s=distance * max(low.error_s, high.error_s, 0.02 * high.compute_s),
        )

    def step_of(self, samples: int | None) -> StepFacts:
        """The step of a typical rank. Raises UsageError: see `compute_of`."""
        compute_s = self.compute_of(samples).compute_s
        backward_s = compute_s * self.backward_share
        if self.gradients is None:
            gradients = _evenly(self.parameters or 0, backward_s)
        else:
            columns = self.gradients
            scale = backward_s / max([*columns.ready_s, 1e-12])
            gradients = tuple(
                sorted(
                    (
                        ReadyGradient(
                            ready_s=ready_s * scale, numel=numel, nbytes=nbytes, is_small=is_small
                        )
                        for ready_s, numel, nbytes, is_small in zip(
                            columns.ready_s,
                            columns.numel,
                            columns.nbytes,
                            columns.is_small,
                            strict=True,
                        )
                    ),
                    key=lambda gradient: gradient.ready_s,
                )
            )
        return StepFacts(
            compute_s=compute_s,
            backward_s=backward_s,
            gradients=gradients,
            after_s=compute_s * self.after_share,
            deviations=tuple(self.deviations),
        )

    def codec_of(self, name: str) -> CodecFacts:
        """A codec by name. Raises UsageError: it was not timed."""
        if name == "float32":
            return CodecFacts(name=name)
        time = self.codecs.get(name)
        if time is None:
            known = ", ".join(["float32", *self.codecs])
            raise UsageError(
                f"The codec {name} was not timed, so it cannot be predicted; known are {known}. "
                "Add --time-codecs to time it on this machine, or [codecs] to the description."
            )
        return CodecFacts(name=name, bits=time.bits, encode_s=time.encode_s, decode_s=time.decode_s)

    def link_of(self, rate: str | None) -> LinkSpeed | None:
        """The adapter as measured, or with another rate. Raises UsageError: no latency is known."""
        if self.link is None:
            if rate is None:
                return None
            raise UsageError(
                f"The time of a message over a link of {rate} is not known: no run with several "
                "hosts was recorded. Add one, or [link] with latency_s to the description."
            )
        bandwidth = self.link.bandwidth_bytes_per_s
        if bandwidth is None or (rate is not None and rate != self.link.rate):
            bandwidth = rate_bytes_per_s(rate or self.link.rate or "") * PAYLOAD_SHARE
        return LinkSpeed(
            latency_s=self.link.latency_s,
            bandwidth_bytes_per_s=bandwidth,
            message_s=self.link.latency_s / 2
            if self.link.message_s is None
            else self.link.message_s,
        )

    def costs_of(self) -> ExchangeCosts:
        """What an exchange takes from the cores; nothing if it is not known."""
        if self.costs is None:
            return ExchangeCosts()
        return ExchangeCosts(
            pack_s_per_byte=self.costs.pack_s_per_byte,
            send_s_per_byte=self.costs.send_s_per_byte,
            interference=self.costs.interference,
            wake_s=self.costs.wake_s,
        )


def rate_bytes_per_s(rate: str) -> float:
    """The bytes per second of a rate such as ``10gbit``. Raises UsageError: it is none.

    >>> rate_bytes_per_s("1gbit")
    125000000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    if match is None or not float(match[1]) > 0:
        raise UsageError(f"{rate!r} is not a rate. Write it as '10gbit', '100mbit' or '2.5gbit'.")
    return float(match[1]) * _FACTORS[match[2]] / 8


def schedule_of(name: str) -> str:
    """The model's name of a schedule. Raises UsageError: it has no model."""
    if name in LOCAL_UPDATES or name == "blocks":
        return "blocks"
    if name not in SCHEDULES:
        known = ", ".join([*(each for each in SCHEDULES if each != "blocks"), *LOCAL_UPDATES])
        raise UsageError(f"No prediction model for schedule {name!r}: there is one for {known}.")
    return name


def read_description(path: Path) -> Description:
    """Read a file. Raises UsageError: it cannot be read, or does not hold a description."""
    try:
        text = path.read_text()
        content: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return msgspec.convert(content, Description)
    except OSError as error:
        why = "it does not exist" if isinstance(error, FileNotFoundError) else error.strerror
        raise UsageError(
            f"The description {path} cannot be read: {why}. Name a .toml or .json file that "
            "describes the training, or the folder of a recorded run."
        ) from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{path} does not describe a training: {error}. `python -m pydoc "
            "torchmn.planning.description` shows an example."
        ) from None


def _evenly(num_parameters: int, backward_s: float) -> tuple[ReadyGradient, ...]:
    """Parameters of equal size whose gradients become ready one after another."""
    numel = math.ceil(num_parameters / _NUM_GRADIENTS)
    return tuple(
        ReadyGradient(
            ready_s=backward_s * (i + 1) / _NUM_GRADIENTS,
            numel=numel,
            nbytes=4 * numel,
            is_small=False,
        )
        for i in range(_NUM_GRADIENTS)
    )
