"""What a run records: one file of JSON lines per rank, `rank{rank}.jsonl` in the folder `steps`.

The first line is a `RunStart`; the others follow in the order of their time. A file may end in the
middle of a line, since the run may not have ended, or have been killed. Long runs are rotated:
`rank{rank}.1.jsonl` continues `rank{rank}.jsonl`, and so on.

Times ``at_s`` are seconds of the rank's own monotonic clock (`time.perf_counter`). A `ClockOffset`
tells how far it is from that of rank 0.
"""

from __future__ import annotations

from typing import Literal, get_args

from torchmn.control.codec import Record

FORMAT = 1

Phase = Literal[
    "data",
    "copy",
    "forward",
    "backward",
    "exchange",
    "encode",
    "decode",
    "optimizer",
    "evaluation",
    "checkpoint",
    "other",
]
"""The parts of a step, which do not overlap and add up to it.

``data`` waits for the next batch, ``copy`` moves it to the device, ``backward`` lasts until this
rank's last gradient is ready, ``exchange`` is what the training thread waits for the exchange,
without ``encode`` and ``decode`` where that thread does them, ``other`` is the rest.
"""
PHASES: tuple[Phase, ...] = get_args(Phase)

NOISE_SCALE = "gradient_noise_scale"
"""The name of the `Value` in which `GradientNoiseScale` reports samples."""


class RunStart(Record, frozen=True, kw_only=True):
    """The first line of a rank. ``unix_s`` and ``at_s`` are one moment on two clocks.

    ``settings`` holds what the training uses, as text: schedule, codec, route, bucket size, model
    and optimizer class; a `SettingsChanged` replaces some of them. ``link_bytes_per_s`` is the
    nominal speed of the adapter at which other hosts reach this rank, 0 where it is not known.
    """

    format: int
    rank: int
    size: int
    intra_rank: int
    inter_rank: int
    host: str
    pid: int
    device: str
    cpus: list[int]
    unix_s: float
    at_s: float
    settings: dict[str, str]
    versions: dict[str, str]
    link_bytes_per_s: float = 0.0


class SettingsChanged(Record, frozen=True, kw_only=True):
    """Autotuning, a warm-up or the script has changed settings from ``step`` on."""

    step: int
    settings: dict[str, str]


class Bucket(Record, frozen=True, kw_only=True):
    """One exchange of a step, in seconds after the step's begin.

    ``ready_s`` is when this rank had the gradients, ``started_s`` when its engine began with the
    exchange, which ends when the slowest rank has sent its part. A bucket is listed in the step in
    which its exchange ended: times of one that began in the step before are negative. ``encode_s``
    and ``decode_s`` are what the codec took of it (0 on GPUs).
    """

    number: int
    nbytes: int
    sent_nbytes: int
    ready_s: float
    started_s: float
    ended_s: float
    encode_s: float = 0.0
    decode_s: float = 0.0


class Step(Record, frozen=True, kw_only=True):
    """One step of this rank, from the end of the previous one.

    ``phases`` leaves out those of 0 s. ``sent`` and ``received`` are bytes by the host at the other
    end, messages within the host under its own name. ``run_queue_s`` is how long the training
    thread was ready to run and had no core, ``cpu_s`` how long it ran, and ``others_cpu_s`` how
    long the process's other threads ran, such as those of the exchange; None where the system does
    not tell.
    """

    step: int
    at_s: float
    seconds: float
    phases: dict[Phase, float]
    samples: int | None = None
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    buckets: list[Bucket] = []
    run_queue_s: float | None = None
    cpu_s: float | None = None
    others_cpu_s: float | None = None


class GradientTimes(Record, frozen=True, kw_only=True):
    """When each gradient was ready, in seconds after the begin of backward. Of some steps only."""

    step: int
    ready_s: list[float]
    numel: list[int]
    nbytes: list[int]
    is_small: list[bool]


class Memory(Record, frozen=True, kw_only=True):
    """Bytes of the process, and of the device's allocator (0 on CPUs)."""

    at_s: float
    rss_nbytes: int
    device_nbytes: int


class Value(Record, frozen=True, kw_only=True):
    """A number that the script reports, such as its loss."""

    step: int
    name: str
    value: float


class ClockOffset(Record, frozen=True, kw_only=True):
    """Rank 0's clock showed ``at_s + offset_s``, give or take ``error_s``."""

    at_s: float
    offset_s: float
    error_s: float


class RunEnd(Record, frozen=True, kw_only=True):
    """The script has ended by itself."""

    at_s: float
    status: int
    phases: dict[Phase, float] = {}
    """Since the end of the last step."""


Line = RunStart | SettingsChanged | Step | GradientTimes | Memory | Value | ClockOffset | RunEnd
