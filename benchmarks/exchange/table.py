"""The table of `make bench-exchange` as data: sides, lines and limits.

A *side* is one way of training (or of computing one mean). A *line* is a setting (hosts, workers
per host, rate of the links), the sides that take turns in it, and the limits that they must meet.
A side may appear in several lines and is the same in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torchmn.cluster.units import MiB

BATCH = 32  # samples of one worker in one step
BLOCK_STEPS = 16
BASELINE = "no-exchange"
Runtime = Literal["torch", "cntk"]


@dataclass(frozen=True, kw_only=True)
class Side:
    """How a side is built and how long its turn lasts.

    ``lead_steps`` run before the clock starts, so that an overlapped schedule begins its timed
    steps with an exchange in flight, as it ends them. A block schedule needs none: its turn is one
    block, and ``warm_up_steps`` places the exchange so that nothing is in flight at either end.

    ``accuracy`` names the sides of the accuracy table that train in the same way and decide whether
    this one counts (`exclusions.py`); it is empty for sums, which lose nothing, and for peers. None
    is the plan that `auto` has chosen in the run.
    """

    name: str
    build: str
    options: Mapping[str, object] = field(default_factory=dict)
    steps: int = 3
    lead_steps: int = 1
    warm_up_steps: int = 3
    what: Literal["step", "mean"] = "step"
    runtime: Runtime = "torch"
    accuracy: tuple[str, ...] | None = ()


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The fastest of ``ours`` is at least ``minimum`` times as fast as the fastest of ``theirs``.

    With ``nbytes``, the bytes of ``ours`` over a link, per direction and step, are within the
    relative ``tolerance`` of that number instead.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...] = (BASELINE,)
    minimum: float = 0.0
    nbytes: float | None = None
    tolerance: float = 0.02


@dataclass(frozen=True, kw_only=True)
class Line:
    """A setting, its sides in the order of their turns, and its limits.

    The baseline takes a turn before every ``baseline_every``-th side. ``steps`` overrides the
    number of timed steps of some sides.
    """

    name: str
    sides: tuple[str, ...]
    limits: tuple[Limit, ...] = ()
    num_hosts: int = 2
    workers_per_host: int = 1
    rate: str | None = "1gbit"
    launcher: Literal["popen", "mpirun"] = "popen"
    baseline: str | None = BASELINE
    baseline_every: int = 3
    steps: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        return self.num_hosts * self.workers_per_host


# ---- sides ----


def _torchmn(name: str, accuracy: tuple[str, ...] = (), **options: object) -> Side:
    return Side(name=name, build="torchmn", options=options, accuracy=accuracy or (name,))


def _auto(name: str, accuracy: tuple[str, ...] | None, **options: object) -> Side:
    """All trials of `torchmn.exchange.auto.tuner` run in the warm-up, before the first turn."""
    return Side(
        name=name,
        build="torchmn",
        options={"codec": "auto", "schedule": "auto", **options},
        warm_up_steps=72,
        accuracy=accuracy,
    )


def _blocks(
    name: str,
    schedule: str,
    overlap_steps: int = 0,
    codec: str | None = None,
    *,
    is_recommended: bool = False,
) -> Side:
    """The exchange begins 4 steps after the beginning of a turn and has 12 steps to finish."""
    options = {
        "schedule": schedule,
        "schedule_options": {"overlap_steps": overlap_steps} if overlap_steps else {},
        "codec": codec,
        "recommended": is_recommended,
    }
    return Side(
        name=name,
        build="torchmn blocks",
        options=options,
        steps=BLOCK_STEPS,
        lead_steps=0,
        warm_up_steps=2 * BLOCK_STEPS - 4,
        accuracy=(name,),
    )


def _peer_blocks(name: str, build: str, **options: object) -> Side:
    return Side(
        name=name,
        build=build,
        options=options,
        steps=BLOCK_STEPS,
        lead_steps=0,
        warm_up_steps=2 * BLOCK_STEPS,
    )


def _mean(name: str, build: str, **options: object) -> Side:
    return Side(name=name, build=build, options=options, steps=4, warm_up_steps=2, what="mean")


_ALL = (
    Side(name=BASELINE, build="alone", steps=4),
    # What every synchronous exchange loses to the slowest worker of each step, however fast it is.
    Side(name="no-exchange, waiting", build="alone", options={"barrier": True}),
    Side(name="ddp", build="ddp"),
    Side(name="ddp fp16", build="ddp", options={"hook": "fp16"}),
    Side(name="ddp powersgd", build="ddp", options={"hook": "powersgd"}, warm_up_steps=6),
    Side(name="ddp hook int8", build="ddp", options={"hook": "torchmn int8"},
         accuracy=("ddp hook int8",)),
    Side(name="horovod", build="horovod"),
    Side(name="horovod fp16", build="horovod", options={"compression": "fp16"}),
    _peer_blocks("post-local SGD", "post-local SGD"),
    _peer_blocks("torchft DiLoCo", "torchft", fragments=1, delay_steps=0),
    _peer_blocks("torchft streaming", "torchft", fragments=2, delay_steps=4),
    _torchmn("every step"),
    _torchmn("every step, flat in buckets", ("every step",), route="flat in buckets"),
    _torchmn("double buffering", schedule="double_buffering"),
    *(
        _torchmn(f"every step {codec}", codec=codec)
        for codec in ("float16", "bfloat16", "int8", "int4", "int2", "1bit", "power_sgd")
    ),
    *(
        _torchmn(f"double buffering {codec}", codec=codec, schedule="double_buffering")
        for codec in ("float16", "int8", "1bit")
    ),
    _torchmn("parameter server", schedule="parameter_server"),
    _auto("auto", ("every step",), optimizer={}),
    _auto(
        "auto lossy",
        None,
        optimizer={"lossy": True, "stale": True},
    ),
    *(
        _blocks(f"{name}{f' {codec}' if codec else ''}{mode}", schedule, overlap_steps, codec)
        for name, schedule in (
            ("periodic average", "PeriodicAverage"),
            ("block momentum", "BlockMomentum"),
            ("DiLoCo", "DiLoCo"),
        )
        for codec in (None, "int8")
        for mode, overlap_steps in (("", 0), (", overlapped", 6))
    ),
    *(
        _blocks(f"DiLoCo{codec}, recommended", "DiLoCo", 6, codec.strip() or None,
                is_recommended=True)
        for codec in ("", " int8")
    ),
    *(
        Side(name=f"double buffering{codec}, recommended", build="double buffering, recommended",
             options={"codec": codec.strip() or None},
             accuracy=(f"double buffering{codec}, recommended",))
        for codec in ("", " int8")
    ),
    *(
        Side(name=f"MLP, {name}", build=build, options=options, steps=48, lead_steps=16,
             warm_up_steps=20, accuracy=accuracy)
        for name, build, options, accuracy in (
            ("1 bit", "MLP with CNTK's names", {"bits": 1}, ("every step 1bit",)),
            ("32 bit", "MLP with CNTK's names", {"bits": 32}, ("every step",)),
            ("block momentum", "MLP with CNTK's names", {"block": True}, ("block momentum",)),
            ("no-exchange", "MLP alone", {}, ()),
        )
    ),
    *(
        Side(name=f"CNTK {name}", build="", runtime="cntk", steps=48, lead_steps=16)
        for name in ("1 bit", "32 bit", "block momentum")
    ),
    _mean("mean, hierarchical", "mean", route="hierarchical", nbytes=60_000_000),
    _mean("mean, flat in buckets", "mean", route="flat in buckets", nbytes=60_000_000),
    _mean("mean, shared memory", "mean", route="single_node", nbytes=64_000_000, whole=True),
    _mean("mean, gloo in buckets", "mean by gloo", nbytes=60_000_000, bucket_bytes=4 * MiB),
    _mean("mean, gloo", "mean by gloo", nbytes=64_000_000),
    _mean("mean, Open MPI", "mean by MPI", nbytes=64_000_000),
)  # fmt: skip
SIDES = {side.name: side for side in _ALL}


# ---- lines ----

_LOSSY = (
    *("every step float16", "every step bfloat16", "every step int8", "every step int4"),
    *("every step 1bit", "every step power_sgd"),
)
_LATE = ("double buffering", "double buffering int8")
_BLOCKING = ("block momentum", "DiLoCo")
_OVERLAPPED = ("block momentum, overlapped", "DiLoCo, overlapped")
_BLOCKING_INT8 = ("block momentum int8", "DiLoCo int8")
_OVERLAPPED_INT8 = ("block momentum int8, overlapped", "DiLoCo int8, overlapped")
_RECOMMENDED = (
    *("double buffering, recommended", "double buffering int8, recommended"),
    *("DiLoCo, recommended", "DiLoCo int8, recommended"),
)
_PEER_BLOCKS = ("post-local SGD", "torchft DiLoCo", "torchft streaming")
_HOROVOD = ("horovod", "horovod fp16")
_FLOAT32 = ("no-exchange, waiting", "ddp", *_HOROVOD, "every step", "auto")
_FIXED_LOSSLESS = ("every step",)
_SLOW_STEPS = {"ddp": 1, "ddp fp16": 1, "every step": 1, "every step float16": 1}


def _lines_of(num_hosts: int, shares: float, ratios: Mapping[str, float]) -> tuple[Line, ...]:
    """The lines for a number of hosts; ``shares`` is subtracted from all shares of the baseline."""
    prefix = f"{num_hosts}h"
    every = Limit(ours=("every step",), theirs=("ddp",), minimum=ratios["1gbit"])
    auto = Limit(ours=("auto",), theirs=_FIXED_LOSSLESS, minimum=0.95)
    best = (*_FIXED_LOSSLESS, *_LOSSY, *_LATE)
    auto_lossy = Limit(ours=("auto lossy",), theirs=best, minimum=0.95)
    return (
        Line(
            name=f"{prefix}-1gbit-float32",
            num_hosts=num_hosts,
            sides=_FLOAT32,
            limits=(every, auto),
        ),
        Line(
            name=f"{prefix}-1gbit-lossy",
            num_hosts=num_hosts,
            sides=("no-exchange, waiting", "ddp fp16", *_FIXED_LOSSLESS, *_LOSSY, *_LATE,
                   "auto lossy"),
            limits=(Limit(ours=_LOSSY, minimum=0.90 - shares), auto_lossy),
        ),
        Line(
            name=f"{prefix}-1gbit-blocks",
            num_hosts=num_hosts,
            sides=(*_PEER_BLOCKS, "periodic average", *_BLOCKING, *_OVERLAPPED, *_BLOCKING_INT8,
                   *_OVERLAPPED_INT8),
            limits=(
                *(Limit(ours=(side,), minimum=0.93 - shares)
                  for side in (*_BLOCKING, *_BLOCKING_INT8)),
                *(Limit(ours=(side,), minimum=0.98 - shares)
                  for side in (*_OVERLAPPED, *_OVERLAPPED_INT8)),
            ),
            baseline_every=2,
            steps={BASELINE: 8},
        ),
        Line(
            name=f"{prefix}-100mbit-lossy",
            num_hosts=num_hosts,
            rate="100mbit",
            sides=("no-exchange, waiting", "ddp", "ddp fp16", *_FIXED_LOSSLESS, *_LOSSY,
                   "double buffering 1bit", "auto lossy"),
            limits=(
                Limit(ours=("every step 1bit",), minimum=0.80 - shares),
                Limit(ours=("auto lossy",), minimum=0.95,
                      theirs=(*_FIXED_LOSSLESS, *_LOSSY, "double buffering 1bit")),
            ),
            steps=_SLOW_STEPS,
        ),
        Line(
            name=f"{prefix}-100mbit-blocks",
            num_hosts=num_hosts,
            rate="100mbit",
            sides=("torchft DiLoCo", "torchft streaming", *_BLOCKING_INT8, *_OVERLAPPED_INT8),
            limits=tuple(
                Limit(ours=(side,), minimum=0.95 - shares) for side in _OVERLAPPED_INT8
            ),
            baseline_every=2,
            steps={BASELINE: 8},
        ),
        *(
            Line(
                name=f"{prefix}-{rate}-recommended",
                num_hosts=num_hosts,
                rate=rate,
                sides=("ddp", "ddp fp16", "every step 1bit", *_RECOMMENDED),
                limits=(Limit(ours=("DiLoCo int8, recommended",), minimum=0.95 - shares),),
                steps={"ddp": 1, "ddp fp16": 1} if rate == "100mbit" else {},
            )
            for rate in ("1gbit", "100mbit")
        ),
        Line(
            name=f"{prefix}-10gbit-float32",
            num_hosts=num_hosts,
            rate="10gbit",
            sides=("ddp", "ddp fp16", *_HOROVOD, "every step", "every step float16",
                   "every step int8", "double buffering", "auto"),
            limits=(
                Limit(ours=("every step",), theirs=("ddp",), minimum=ratios["10gbit"]),
                auto,
            ),
        ),
    )  # fmt: skip


_LINES = (
    *_lines_of(2, 0.0, {"1gbit": 1.08, "10gbit": 1.04}),
    *_lines_of(4, 0.05, {"1gbit": 1.0, "10gbit": 1.0}),
    Line(  # the exchange takes longer than the backward pass, so that it cannot hide all of it
        name="2h-500mbit-float32",
        rate="500mbit",
        sides=("ddp", "every step"),
    ),
    Line(  # alone in its line, because it has aborted the process
        name="2h-1gbit-powersgd-hook",
        sides=("ddp", "ddp powersgd"),
    ),
    Line(  # the same codecs as DDP communication hooks
        name="2h-1gbit-ddp-hook",
        sides=("ddp", "ddp fp16", "ddp hook int8"),
    ),
    Line(
        name="2h-1gbit-server",
        sides=("ddp", "parameter server"),
    ),
    Line(  # compared with CNTK's learners, which run in their own processes
        name="2h-200mbit-cntk",
        rate="200mbit",
        baseline="MLP, no-exchange",
        sides=("MLP, 1 bit", "CNTK 1 bit", "MLP, block momentum", "CNTK block momentum",
               "MLP, 32 bit", "CNTK 32 bit"),
        limits=(Limit(ours=("MLP, 1 bit",), theirs=("CNTK 1 bit",), minimum=1.0),),
    ),
    Line(
        name="2x2-1gbit-mean",
        workers_per_host=2,
        sides=("mean, gloo in buckets", "mean, flat in buckets", "mean, hierarchical"),
        baseline=None,
        limits=(  # gloo sends in a ring, the minimum; our flat route sums at owners
            Limit(
                ours=("mean, hierarchical",),
                theirs=("mean, gloo in buckets", "mean, flat in buckets"),
                minimum=1.25,
            ),
            Limit(ours=("mean, hierarchical",), nbytes=60e6),
            Limit(ours=("mean, gloo in buckets",), nbytes=90e6),
        ),
    ),
    Line(
        name="2x2-1gbit-step",
        workers_per_host=2,
        sides=("ddp", "every step, flat in buckets", "every step"),
        limits=(
            Limit(
                ours=("every step",), theirs=("ddp", "every step, flat in buckets"), minimum=1.0
            ),
        ),
    ),
    Line(
        name="1x2-mean",
        num_hosts=1,
        workers_per_host=2,
        rate=None,
        launcher="mpirun",
        baseline=None,
        sides=("mean, gloo", "mean, Open MPI", "mean, shared memory"),
        limits=(
            Limit(ours=("mean, shared memory",), theirs=("mean, gloo",), minimum=4.0),
            Limit(ours=("mean, shared memory",), theirs=("mean, Open MPI",), minimum=1.8),
        ),
    ),
    Line(
        name="1x2-step",
        num_hosts=1,
        workers_per_host=2,
        rate=None,
        sides=("ddp", "every step", "every step float16", "auto"),
        limits=(Limit(ours=("auto",), theirs=_FIXED_LOSSLESS, minimum=0.95),),
    ),
)  # fmt: skip
LINES = {line.name: line for line in _LINES}
