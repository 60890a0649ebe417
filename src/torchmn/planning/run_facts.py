"""A description from recorded runs.

Steps without exchange come from the runs on one rank, or, where there is none with a batch size,
from the others with what they wait for the exchange left out. The link and the codecs come from
the exchanges of runs on several hosts, and the costs of an exchange from how long their steps took
(`calibration`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmn.autotune.crossing import crossing
from torchmn.errors import DataError
from torchmn.planning.calibration import Observation, calibrated
from torchmn.planning.description import (
    PAYLOAD_SHARE,
    BatchTime,
    CodecTime,
    Description,
    Gradients,
    Link,
    Setting,
)
from torchmn.profiling.recorded_run import RankRecord, Run
from torchmn.profiling.records import PHASES, GradientTimes
from torchmn.profiling.run_reader import read_run
from torchmn.units import MiB

_NOT_COMPUTED = ("exchange", "encode", "decode", "evaluation", "checkpoint")
_NUM_WARM_UP = 5
_MIN_STEPS = 5
_MAX_DEVIATIONS = 1000
_OTHER_LINK = 1.3  # a bandwidth that differs by this factor is of another link
_MIN_LATENCY_S = 5e-6
_MAX_CORES = 2.0


def describe_runs(paths: Sequence[Path]) -> Description:
    """All that these runs say. Raises DataError: they have too few steps, or are of two models."""
    runs = [_RecordedRun(read_run(path), path) for path in paths]
    sizes = {run.gradient_nbytes for run in runs if run.gradients is not None}
    if len(sizes) > 1:
        raise DataError(
            f"The runs have gradients of {', '.join(f'{n:.0f}' for n in sorted(sizes))} bytes: "
            "they are not of one model. Give runs of one training."
        )
    timed = next((run for run in runs if run.gradients is not None), None)
    if timed is None or timed.gradients is None:
        raise DataError(
            f"No run in {', '.join(map(str, paths))} has noted when gradients are ready. Record "
            "20 steps or more of a training with a multi-node optimizer."
        )
    linked = [run for run in runs if run.setting.hosts > 1 and run.bandwidth_bytes_per_s]
    runs.sort(key=lambda run: run.setting.num_ranks)
    typical = runs[0]
    backward_share = min(0.99, typical.share_of("backward"))
    known = Description(
        title=", ".join(str(path) for path in paths),
        batches=_batches(runs),
        gradients=timed.gradients,
        backward_share=backward_share,
        after_share=min(typical.share_of("optimizer"), 1 - backward_share),
        link=_link(linked[0]) if linked else None,
        codecs=dict(found for run in runs for found in run.codec_times(timed.num_encoded)),
        deviations=_thinned([d for run in runs for d in run.deviations]),
        setting=max(runs, key=lambda run: run.setting.num_ranks).setting,
    )
    observations = [
        Observation(setting=_on_own_link(run, known), step_s=run.step_s)
        for run in runs
        if run.setting.num_ranks > 1 and (run.setting.hosts == 1 or known.link is not None)
        if run.setting.codec == "float32" or run.setting.codec in known.codecs
    ]
    return calibrated(known, observations)


class _RecordedRun:
    """What one run says."""

    def __init__(self, run: Run, path: Path) -> None:
        self._ranks = run.ranks
        self._path = path
        self._rows = [_usable(rank) for rank in run.ranks]
        if any(int(np.sum(rows)) < _MIN_STEPS for rows in self._rows):
            raise DataError(
                f"The run in {path} has fewer than {_MIN_STEPS + _NUM_WARM_UP} steps on some rank. "
                "Record 20 steps or more."
            )
        self.setting = self._setting()
        computed = [PHASES.index(phase) for phase in PHASES if phase not in _NOT_COMPUTED]
        share = min(1.0, self.setting.cores_per_rank)
        self._compute = [
            rank.steps.phases[rows][:, computed].sum(axis=1).astype(np.float64) * share
            for rank, rows in zip(self._ranks, self._rows, strict=True)
        ]
        every = np.concatenate(self._compute)
        self.compute_s = float(np.median(every))
        self.error_s = float(np.std(every) / np.sqrt(len(every)))
        self.deviations = [float(each) / self.compute_s - 1 for each in every]
        seconds = [
            rank.steps.seconds[rows].astype(np.float64) - _pauses(rank, rows)
            for rank, rows in zip(self._ranks, self._rows, strict=True)
        ]
        self.step_s = float(np.mean(np.concatenate(seconds)))
        times = [each for rank in self._ranks for each in rank.gradient_times]
        self.gradients = _gradients(times) if times else None

    @property
    def gradient_nbytes(self) -> int:
        return 0 if self.gradients is None else sum(self.gradients.nbytes)

    @property
    def num_encoded(self) -> int:
        """Elements that a codec encodes."""
        columns = self.gradients
        if columns is None:
            return 0
        pairs = zip(columns.numel, columns.is_small, strict=True)
        return sum(numel for numel, is_small in pairs if not is_small)

    def share_of(self, phase: Any) -> float:
        """Of a typical step without exchange."""
        column = PHASES.index(phase)
        share = min(1.0, self.setting.cores_per_rank)
        values = np.concatenate(
            [
                rank.steps.phases[rows][:, column]
                for rank, rows in zip(self._ranks, self._rows, strict=True)
            ]
        )
        return float(np.median(values)) * share / self.compute_s

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The highest rate at which a rank has sent the buckets of a step."""
        rates = [
            sent / busy_s
            for rank, rows in zip(self._ranks, self._rows, strict=True)
            for sent, busy_s in _sent_and_busy(rank, rows)
            if sent > 0 and busy_s > 0
        ]
        return float(np.quantile(rates, 0.9)) if rates else 0.0

    def latency_s(self, bandwidth_bytes_per_s: float) -> float:
        """Of a round: what the quickest bucket took beyond its bytes."""
        setting = self.setting
        num_rounds = crossing(
            setting.route, setting.hosts, setting.ranks_per_host, is_encoded=False
        ).num_rounds
        found = []
        for rank in self._ranks:
            buckets = rank.steps.buckets
            spans = buckets.ended_s - buckets.started_s
            is_sent = buckets.sent_nbytes > 0
            found += list((spans - buckets.sent_nbytes / bandwidth_bytes_per_s)[is_sent])
        positive = [each for each in found if each > 0]
        return max(_MIN_LATENCY_S, min(positive, default=0.0) / max(1, num_rounds))

    def codec_times(self, num_encoded: int) -> list[tuple[str, CodecTime]]:
        """The codec of this run, if its buckets say how long it took."""
        name, hosts = self.setting.codec, self.setting.hosts
        if name == "float32" or hosts < 2 or not num_encoded:
            return []
        encode, decode, bits = [], [], []
        for rank in self._ranks:
            buckets = rank.steps.buckets
            num_exchanges = len(np.unique(buckets.row))
            if num_exchanges and float(np.sum(buckets.encode_s)) > 0:
                encode.append(float(np.sum(buckets.encode_s)) / num_exchanges / num_encoded)
                decode.append(float(np.sum(buckets.decode_s)) / num_exchanges / num_encoded)
                bits.append(32 * float(np.sum(buckets.sent_nbytes) / np.sum(buckets.nbytes)))
        if not encode:
            return []
        share = crossing(
            self.setting.route, hosts, self.setting.ranks_per_host, is_encoded=True
        ).share
        return [
            (
                name,
                CodecTime(
                    bits=statistics.median(bits) / share,
                    encode_s=statistics.median(encode),
                    decode_s=statistics.median(decode) / (1 + (hosts - 1) / hosts),
                ),
            )
        ]

    def _setting(self) -> Setting:
        first, settings = self._ranks[0], self._ranks[0].settings
        hosts = 1 + max(rank.start.inter_rank for rank in self._ranks)
        samples = first.steps.samples[self._rows[0]]
        on_host = [rank for rank in self._ranks if rank.start.host == first.start.host]
        cores = len({cpu for rank in on_host for cpu in rank.start.cpus}) or len(on_host)
        has_exchange = np.unique(first.steps.buckets.row)
        spacing = int(np.median(np.diff(has_exchange))) if len(has_exchange) > 1 else 1
        return Setting(
            hosts=hosts,
            ranks_per_host=max(1, round(first.start.size / hosts)),
            cores_per_rank=min(_MAX_CORES, cores / len(on_host)),
            route=settings.get("route", "hierarchical").split(" ")[0],
            schedule=settings.get("schedule", "every_step"),
            codec=settings.get("codec", "float32"),
            samples=int(np.median(samples)) if np.all(np.isfinite(samples)) else 1,
            bucket_bytes=int(settings.get("bucket_bytes", 4 * MiB)),
            block_steps=max(1, spacing),
        )


def _usable(rank: RankRecord) -> NDArray[np.bool_]:
    """The steps without the first ones and without those that evaluate or save."""
    steps = rank.steps
    pauses = [PHASES.index(phase) for phase in ("evaluation", "checkpoint")]
    quiet = steps.phases[:, pauses].sum(axis=1) < 0.01 * np.maximum(steps.seconds, 1e-9)
    first = rank.first_step + min(_NUM_WARM_UP, len(steps) // 3)
    return np.asarray((steps.step >= first) & quiet)


def _pauses(rank: RankRecord, rows: NDArray[np.bool_]) -> NDArray[np.float64]:
    pauses = [PHASES.index(phase) for phase in ("evaluation", "checkpoint")]
    return np.asarray(rank.steps.phases[rows][:, pauses].sum(axis=1), dtype=np.float64)


def _sent_and_busy(rank: RankRecord, rows: NDArray[np.bool_]) -> list[tuple[float, float]]:
    """Bytes sent, and how long some bucket was being exchanged, of each step."""
    buckets = rank.steps.buckets
    found = []
    for row in np.flatnonzero(rows):
        of_step = buckets.row == row
        busy_s, until_s = 0.0, -np.inf
        for started_s, ended_s in sorted(
            zip(buckets.started_s[of_step], buckets.ended_s[of_step], strict=True)
        ):
            busy_s += max(0.0, ended_s - max(started_s, until_s))
            until_s = max(until_s, ended_s)
        found.append((float(np.sum(buckets.sent_nbytes[of_step])), float(busy_s)))
    return found


def _gradients(times: Sequence[GradientTimes]) -> Gradients:
    """The medians over the steps in which they were noted."""
    first = times[0]
    same = [each for each in times if each.numel == first.numel]
    ready_s = np.median(np.array([each.ready_s for each in same]), axis=0)
    return Gradients(
        ready_s=[float(each) for each in ready_s],
        numel=first.numel,
        nbytes=first.nbytes,
        is_small=first.is_small,
    )


def _batches(runs: Sequence[_RecordedRun]) -> list[BatchTime]:
    """One per batch size, of the run with the fewest ranks."""
    found: dict[int, BatchTime] = {}
    for run in runs:
        samples = run.setting.samples or 1
        found.setdefault(
            samples, BatchTime(samples=samples, compute_s=run.compute_s, error_s=run.error_s)
        )
    return list(found.values())


def _link(run: _RecordedRun) -> Link:
    bandwidth = run.bandwidth_bytes_per_s
    return Link(bandwidth_bytes_per_s=bandwidth, latency_s=run.latency_s(bandwidth))


def _on_own_link(run: _RecordedRun, known: Description) -> Setting:
    """The run's setting; with a rate if its link is not the one of the description."""
    own = run.bandwidth_bytes_per_s
    common = known.link.bandwidth_bytes_per_s if known.link is not None else None
    if not own or not common or max(own / common, common / own) < _OTHER_LINK:
        return run.setting
    megabits = own / PAYLOAD_SHARE * 8e-6
    return msgspec.structs.replace(run.setting, rate=f"{megabits:.1f}mbit")


def _thinned(deviations: Sequence[float]) -> list[float]:
    """At most some of them, with the same distribution."""
    ordered = sorted(deviations)
    if len(ordered) <= _MAX_DEVIATIONS:
        return ordered
    positions = np.linspace(0, len(ordered) - 1, _MAX_DEVIATIONS).round().astype(int)
    return [ordered[position] for position in positions]
