"""Records of imitated runs, from a seed: healthy ones, and with a fault in a known place."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchmn.control.codec import encode
from torchmn.record.records import (
    FORMAT,
    Bucket,
    ClockOffset,
    GradientTimes,
    Line,
    Memory,
    Phase,
    RunEnd,
    RunStart,
    Step,
    Value,
)

PHASE_S: dict[Phase, float] = {
    "data": 0.002,
    "copy": 0.001,
    "forward": 0.030,
    "backward": 0.060,
    "optimizer": 0.005,
    "other": 0.001,
}
NOISE = 0.02
CLOCK_ERROR_S = 50e-6


@dataclass(kw_only=True)
class ImitatedRun:
    """A synchronous training: all ranks take part in the exchange of each bucket."""

    num_ranks: int = 4
    ranks_per_host: int = 1
    num_steps: int = 60
    seed: int = 0
    bucket_nbytes: tuple[int, ...] = (4_000_000, 4_000_000, 2_000_000)
    bandwidth_bytes_per_s: float = 1e9
    link_bytes_per_s: float = 0.0
    latency_s: float = 2e-4
    slower: dict[tuple[int, Phase], float] = field(default_factory=dict)
    """By rank and phase: how many times as long it takes."""
    slow_steps: dict[int, tuple[int, Phase, float]] = field(default_factory=dict)
    """By step: a rank, a phase, and the seconds that it takes longer."""
    jitter: float = NOISE
    slow_start_s: float = 0.0
    """How much longer the first step takes."""
    samples: int = 32
    extra: dict[Phase, tuple[int, float]] = field(default_factory=dict)
    """By phase: every how many steps it takes how long, on all ranks."""
    run_queue: dict[int, float] = field(default_factory=dict)
    """By rank: the share of its backward for which it waits for a core."""
    polls: Literal["", "running", "ready"] = ""
    """Whether ranks poll while they wait in the exchange: with a core, or waiting for one."""
    others_cpu_s: float | None = None
    """How long the other threads of each process run in a step."""
    blocked: dict[int, float] = field(default_factory=dict)
    """By rank: the share of its backward in which it neither runs nor waits for a core."""
    cpus: dict[int, list[int]] = field(default_factory=dict)
    has_ended: bool = True
    settings: dict[str, str] = field(
        default_factory=lambda: {"schedule": "every_step", "codec": "none"}
    )
    growth_nbytes: int = 0
    """By how much a process grows in each step."""

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def lines(self) -> list[list[Line]]:
        """Of each rank, in order."""
        rng = random.Random(self.seed)
        num_hosts = self.host_of(self.num_ranks - 1) + 1
        offsets = [0.0] + [rng.uniform(-1000, 1000) for _ in range(1, self.num_ranks)]
        lines: list[list[Line]] = [[self._start(rank, offsets[rank])] for rank in self.ranks]
        begin = [0.0] * self.num_ranks  # in seconds of rank 0's clock
        for step in range(self.num_steps):
            if step % 10 == 0:
                for rank in self.ranks:
                    error = rng.uniform(-CLOCK_ERROR_S, CLOCK_ERROR_S) if rank else 0.0
                    at_s = begin[rank] - offsets[rank]
                    lines[rank].append(
                        ClockOffset(
                            at_s=at_s, offset_s=offsets[rank] + error, error_s=CLOCK_ERROR_S
                        )
                    )
            phases = [self._phases(rank, step, rng) for rank in self.ranks]
            backward_begin = [
                begin[rank] + sum(phases[rank][p] for p in ("data", "copy", "forward"))
                for rank in self.ranks
            ]
            count = len(self.bucket_nbytes)
            ready = [
                [
                    backward_begin[rank] + phases[rank]["backward"] * (number + 1) / count
                    for number in range(count)
                ]
                for rank in self.ranks
            ]
            free = 0.0
            started, ended = [], []
            for number, nbytes in enumerate(self.bucket_nbytes):
                own = [max(free, ready[rank][number]) for rank in self.ranks]
                free = max(own) + self.latency_s + nbytes / self.bandwidth_bytes_per_s
                started.append(own)
                ended.append(free)
            for rank in self.ranks:
                backward_end = backward_begin[rank] + phases[rank]["backward"]
                if self.bucket_nbytes:
                    phases[rank]["exchange"] = max(0.0, free - backward_end)
                total = sum(phases[rank].values())
                peer = f"host{(self.host_of(rank) + 1) % num_hosts}"
                nbytes = sum(self.bucket_nbytes)
                exchange_s = phases[rank].get("exchange", 0.0)
                wait = self.run_queue.get(rank, 0.0) * phases[rank]["backward"]
                if step % 20 == 0 and self.bucket_nbytes:
                    lines[rank].append(_gradient_times(step, phases[rank]["backward"]))
                lines[rank].append(
                    Step(
                        step=step,
                        at_s=begin[rank] - offsets[rank],
                        seconds=total,
                        phases={name: value for name, value in phases[rank].items() if value},
                        samples=self.samples,
                        sent={peer: nbytes} if nbytes else {},
                        received={peer: nbytes} if nbytes else {},
                        buckets=[
                            Bucket(
                                number=number,
                                nbytes=size,
                                sent_nbytes=size,
                                ready_s=ready[rank][number] - begin[rank],
                                started_s=started[number][rank] - begin[rank],
                                ended_s=ended[number] - begin[rank],
                            )
                            for number, size in enumerate(self.bucket_nbytes)
                        ],
                        run_queue_s=wait + (self.polls == "ready") * exchange_s,
                        others_cpu_s=self.others_cpu_s,
                        cpu_s=total
                        - wait
                        - self.blocked.get(rank, 0.0) * phases[rank]["backward"]
                        - (self.polls != "running") * exchange_s,
                    )
                )
                begin[rank] += total
                if step % 5 == 0:
                    at_s = begin[rank] - offsets[rank]
                    rss = 500_000_000 + step * self.growth_nbytes
                    lines[rank].append(Memory(at_s=at_s, rss_nbytes=rss, device_nbytes=0))
                    lines[rank].append(Value(step=step, name="loss", value=2.0 / (1 + step / 10)))
        if self.has_ended:
            for rank in self.ranks:
                lines[rank].append(RunEnd(at_s=begin[rank] - offsets[rank], status=0))
        return lines

    @property
    def ranks(self) -> range:
        return range(self.num_ranks)

    def write(self, folder: Path) -> Path:
        """The log folder of the run, which is returned."""
        steps = folder / "steps"
        steps.mkdir(parents=True, exist_ok=True)
        for rank, lines in enumerate(self.lines()):
            with (steps / f"rank{rank}.jsonl").open("wb") as file:
                file.writelines(encode(line) for line in lines)
        return folder

    def _start(self, rank: int, offset_s: float) -> RunStart:
        return RunStart(
            format=FORMAT,
            rank=rank,
            size=self.num_ranks,
            intra_rank=rank % self.ranks_per_host,
            inter_rank=self.host_of(rank),
            host=f"host{self.host_of(rank)}",
            pid=1000 + rank,
            device="cpu",
            cpus=self.cpus.get(rank, [rank % self.ranks_per_host]),
            unix_s=1.7e9,
            at_s=-offset_s,
            settings=self.settings,
            versions={"torch": "2.13.0", "torchmn": "0.1.0"},
            link_bytes_per_s=self.link_bytes_per_s,
        )

    def _phases(self, rank: int, step: int, rng: random.Random) -> dict[Phase, float]:
        phases = {
            phase: seconds * self.slower.get((rank, phase), 1.0) * rng.gauss(1.0, self.jitter)
            for phase, seconds in PHASE_S.items()
        }
        for phase, (period, seconds) in self.extra.items():
            if step % period == period - 1:
                phases[phase] = phases.get(phase, 0.0) + seconds
        if step == 0:
            phases["forward"] += self.slow_start_s
        if step in self.slow_steps and self.slow_steps[step][0] == rank:
            _, phase, seconds = self.slow_steps[step]
            phases[phase] += seconds
        return phases


def _gradient_times(step: int, backward_s: float) -> GradientTimes:
    count = 5
    return GradientTimes(
        step=step,
        ready_s=[backward_s * (number + 1) / count for number in range(count)],
        numel=[500_000] * count,
        nbytes=[2_000_000] * count,
        is_small=[False] * count,
    )
