"""Compare the steps of all ranks of a run, and compute rates and shares from them."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from torchmn.base.errors import DataError
from torchmn.cluster.units import grouped, spans
from torchmn.observe.read.recorded_run import Floats, Integers, RankRecord, Run
from torchmn.record.records import PHASES, Phase

# In which a rank waits for the others; how long it takes for the rest is up to itself.
COLLECTIVE_PHASES: tuple[Phase, ...] = ("exchange", "evaluation", "checkpoint")
# Steps at the beginning that no mean contains: allocations, compilers, first connections.
MAX_WARMUP_STEPS = 5
SLOW_STEP = 2.0
MAX_SLOW_SHARE = 0.25
# Ranks with fewer steps than this share of the longest record are left out.
MIN_SHARE_OF_STEPS = 0.1


@dataclass(frozen=True, kw_only=True)
class Link:
    """Traffic from the ranks of one host to another host, over the steps that were read."""

    source: str
    target: str
    nbytes_per_step: float
    bytes_per_s: float  # while something was being exchanged
    nominal_bytes_per_s: float | None

    @property
    def share(self) -> float | None:
        """Measured rate divided by the nominal one, None if that is unknown."""
        return self.nominal_bytes_per_s and self.bytes_per_s / self.nominal_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class SlowStep:
    """One of the slowest steps: how long it took, and which rank was late in which phase."""

    step: int
    seconds: float
    phase: Phase
    excess_s: float  # by how much the phase was longer than usual
    rank: int | None  # none: on all ranks


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The steps that all ranks have recorded, with seconds ``phases`` (steps, ranks, phases).

    ``step`` has their numbers, shape (steps,). Steady steps are those after the warm-up.
    """

    run: Run
    ranks: tuple[RankRecord, ...]
    notes: tuple[str, ...]  # what is to be known of the records themselves
    step: Integers
    phases: Floats
    rows: tuple[Integers, ...]  # of each rank: the rows of these steps in its `Steps`

    @property
    def num_warmup(self) -> int:
        """Number of steps at the beginning that means leave out."""
        return min(MAX_WARMUP_STEPS, len(self.step) // 4) if self.step[0] <= 1 else 0

    @property
    def steady(self) -> Floats:
        """`phases` without the warm-up."""
        return self.phases[self.num_warmup :]

    @cached_property
    def is_slow(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each steady step took more than twice as long as the median.

        Evaluations and checkpoints do not count. All False if such steps are frequent.
        """
        totals = (self.steady.sum(2) - self.of("evaluation", "checkpoint")).max(1)
        slow = np.asarray(totals > SLOW_STEP * np.median(totals))
        return slow if slow.mean() <= MAX_SLOW_SHARE else np.zeros_like(slow)

    @cached_property
    def own(self) -> Floats:
        """Seconds of each steady step that a rank works by itself, shape ``(steps, ranks)``."""
        return self._own_of_all[self.num_warmup :]

    @cached_property
    def _own_of_all(self) -> Floats:
        """`own`, with the warm-up."""
        collective = [PHASES.index(phase) for phase in COLLECTIVE_PHASES]
        return np.asarray(np.delete(self.phases, collective, axis=2).sum(2), dtype=np.float64)

    def of(self, *phases: Phase) -> Floats:
        """Return the seconds of these phases together in steady steps, shape ``(steps, ranks)``."""
        indices = [PHASES.index(phase) for phase in phases]
        return np.asarray(self.steady[:, :, indices].sum(2), dtype=np.float64)

    @cached_property
    def step_s(self) -> float:
        """Seconds of the mean steady step."""
        return float(self.steady.sum(2).mean())

    @cached_property
    def waited_s(self) -> Floats:
        """Seconds in the phase ``exchange`` of each step on the rank that has the fewest.

        What other ranks have beyond that is waiting for late ranks.
        """
        return np.asarray(self.of("exchange").min(1), dtype=np.float64)

    @cached_property
    def taken_s(self) -> Floats:
        """Seconds that exchange threads took from the training thread, shape ``(steps, ranks)``.

        At most the time that those threads ran, and the time of exchanges for which the training
        thread did not wait. 0 if the system has no counters.
        """
        taken = np.minimum(self.column("run_queue_s"), self.column("others_cpu_s"))
        beside = np.maximum(0.0, self._exchanging_s - self.of("exchange"))
        return np.nan_to_num(np.minimum(taken, beside))

    @cached_property
    def exposed_s(self) -> Floats:
        """Seconds that the exchange adds to each step: waiting for it, and time on its cores."""
        return np.asarray(self.waited_s + self.taken_s.mean(1), dtype=np.float64)

    @property
    def share_of_exposed_exchange(self) -> float:
        """Share of the mean step that the exchange adds, without waiting for late ranks."""
        return float(self.exposed_s.mean()) / self.step_s

    @property
    def share_of_waiting(self) -> float:
        """Share of the mean step in which ranks wait for late ranks in the exchange."""
        return float(self.of("exchange").mean() - self.waited_s.mean()) / self.step_s

    @cached_property
    def mean_phases(self) -> Floats:
        """Seconds of each phase in the mean step, shape ``(ranks, phases)``."""
        return np.asarray(self.steady.mean(0), dtype=np.float64)

    @property
    def lateness_s(self) -> Floats:
        """Seconds by which each rank was ready for the exchange later than the median rank.

        Shape ``(steps, ranks)``, with the warm-up. It compares the time that each rank worked by
        itself, so that neither waiting for others nor the clocks of ranks matter.
        """
        own = self._own_of_all
        middle = (own.shape[1] - 1) // 2  # of two ranks the faster one
        return np.asarray(own - np.sort(own, axis=1)[:, [middle]], dtype=np.float64)

    def column(self, name: str) -> Floats:
        """Return a column of `Steps` for steady steps, shape ``(steps, ranks)``."""
        columns = [getattr(rank.steps, name)[rows] for rank, rows in self._steady_rows]
        return np.array(columns, dtype=np.float64).T

    @property
    def _steady_rows(self) -> list[tuple[RankRecord, Integers]]:
        """Each rank with the rows of the steady steps in its `Steps`."""
        rows = (each[self.num_warmup :] for each in self.rows)
        return list(zip(self.ranks, rows, strict=True))

    @cached_property
    def samples_per_s(self) -> float | None:
        """Samples per second of all ranks together. None if the script reported no samples."""
        samples = self.column("samples")
        if not samples.mean() > 0:
            return None
        return float(samples.mean() / self.step_s * self.run.size)

    @property
    def settings_and_versions(self) -> dict[str, str]:
        """What the training and its libraries are, as the first rank has recorded it."""
        return {**self.ranks[0].settings, **self.ranks[0].start.versions}

    def host(self, index: int) -> str:
        """Return the host of the rank with this index in ``ranks``."""
        return self.ranks[index].start.host

    @cached_property
    def hosts(self) -> dict[str, list[int]]:
        """Indices in ``ranks`` by host."""
        return grouped((self.host(index), index) for index in range(len(self.ranks)))

    @cached_property
    def exchange_busy_s(self) -> Floats:
        """Seconds of each rank's mean step in which its engine moved data, without waiting.

        For each bucket this is the time of the rank that began last, since the others waited.
        """
        durations = []
        for rank, rows in self._steady_rows:
            buckets = rank.steps.buckets
            chosen = np.isin(buckets.row, rows)
            durations.append((buckets.ended_s - buckets.started_s)[chosen])
        if len({len(each) for each in durations}) == 1:
            durations = [np.min(durations, axis=0)] * len(durations)
        return np.array([each.sum() for each in durations]) / len(self.steady)

    @cached_property
    def _exchanging_s(self) -> Floats:
        """Seconds of exchanges in each steady step, shape ``(steps, ranks)``."""
        found = []
        for rank, rows in self._steady_rows:
            buckets = rank.steps.buckets
            seconds = buckets.ended_s - buckets.started_s
            found.append(np.bincount(buckets.row, seconds, len(rank.steps))[rows])
        return np.array(found, dtype=np.float64).T

    @property
    def exchanges_per_step(self) -> float:
        """Mean number of buckets that the first rank exchanges in a step."""
        steps = self.ranks[0].steps
        return len(steps.buckets.row) / len(steps)

    @cached_property
    def links(self) -> list[Link]:
        """Links between hosts in both directions, those that carry most first."""
        sent: defaultdict[tuple[str, str], float] = defaultdict(float)
        for rank in self.ranks:
            for host, nbytes in rank.sent.items():
                sent[rank.start.host, host] += nbytes / max(1, len(rank.steps))
        busy_s = float(self.exchange_busy_s.mean())
        speeds = {rank.start.host: rank.start.link_bytes_per_s for rank in self.ranks}
        return [
            Link(
                source=source,
                target=target,
                nbytes_per_step=nbytes,
                bytes_per_s=nbytes / busy_s if busy_s else float("nan"),
                nominal_bytes_per_s=_slower(speeds.get(source, 0.0), speeds.get(target, 0.0)),
            )
            for (source, target), nbytes in sorted(sent.items(), key=lambda x: (-x[1], x[0]))
            if source != target
        ]

    def slowest_steps(self) -> list[SlowStep]:
        """Return at most five steps that took over 1.5 times the median, the slowest first."""
        totals = self.phases.sum(2).max(1)
        usual = np.median(totals)
        order = np.argsort(totals)[::-1][:5]
        return [self._slow_step(int(row)) for row in order if totals[row] > 1.5 * usual]

    def _slow_step(self, row: int) -> SlowStep:
        excess = self.phases[row] - np.median(self.phases, axis=0)
        # Waiting for another rank is no cause, unless no rank was late by itself.
        causes = np.array(excess)
        exchange = PHASES.index("exchange")
        causes[:, exchange] = causes[:, exchange].min()
        index, phase = np.unravel_index(int(causes.argmax()), causes.shape)
        column = causes[:, phase]
        is_on_all = len(self.ranks) > 1 and column.min() > 0.5 * column.max()
        return SlowStep(
            step=int(self.step[row]),
            seconds=float(self.phases[row].sum(1).max()),
            phase=PHASES[int(phase)],
            excess_s=float(column.max()),
            rank=None if is_on_all else self.ranks[int(index)].start.rank,
        )


def _slower(one: float, other: float) -> float | None:
    """Return the lower of two adapters' speeds; 0 is unknown, and None if both are."""
    return min((each for each in (one, other) if each), default=None)


def summarize(run: Run) -> Summary:
    """Put the ranks' steps side by side. Raises DataError: no step was recorded."""
    longest = max(rank.last_step - rank.first_step + 1 for rank in run.ranks)
    kept = [
        rank
        for rank in run.ranks
        if len(rank.steps) and rank.last_step - rank.first_step + 1 >= MIN_SHARE_OF_STEPS * longest
    ]
    if not kept:
        raise DataError(
            f"The records in {str(run.folder)!r} have no step yet: the training has not begun, it "
            "ended before its first step, or all its lines are damaged."
        )
    # A rank that shares no step with the others is left out as well.
    common, ranks = kept[0].steps.step, [kept[0]]
    for rank in kept[1:]:
        both = np.intersect1d(common, rank.steps.step)
        if len(both):
            common = both
            ranks.append(rank)
    common = np.unique(common)
    rows = tuple(_rows_of(rank.steps.step, common) for rank in ranks)
    phases = np.stack(
        [rank.steps.phases[each] for rank, each in zip(ranks, rows, strict=True)], axis=1
    )
    summary = Summary(
        run=run,
        ranks=tuple(ranks),
        notes=tuple(_notes(run, ranks)),
        step=common,
        phases=np.maximum(phases.astype(np.float64), 0.0),
        rows=rows,
    )
    if not summary.step_s > 0:
        raise DataError(f"All steps in {str(run.folder)!r} last 0 s, which no training does.")
    return summary


def _rows_of(steps: Integers, wanted: Integers) -> Integers:
    """Return the last row of each wanted step: a step that was repeated counts once."""
    order = np.argsort(steps, kind="stable")
    return np.asarray(order[np.searchsorted(steps[order], wanted, side="right") - 1])


def _notes(run: Run, kept: list[RankRecord]) -> list[str]:
    notes = []
    if run.is_running:
        notes.append("The run is still going, or was killed less than two minutes ago.")
    elif killed := [rank.start.rank for rank in run.ranks if rank.end is None]:
        notes.append(f"{rank_list(killed)} ended without a last line: killed, or still running.")
    failed = {r.start.rank: r.end.status for r in run.ranks if r.end is not None and r.end.status}
    if failed:
        statuses = listed([str(status) for status in dict.fromkeys(failed.values())])
        notes.append(f"{rank_list(list(failed))} ended with exit status {statuses}.")
    found = [rank.start.rank for rank in run.ranks] + list(run.unreadable)
    if len(found) < run.size:
        notes.append(f"Of {run.size} ranks only {rank_list(sorted(found)).lower()} left records.")
    notes.extend(
        f"Rank {rank} is left out: {why}" for rank, why in list(run.unreadable.items())[:5]
    )
    shown = {rank.start.rank for rank in kept}
    short = [rank.start.rank for rank in run.ranks if rank.start.rank not in shown]
    if short:
        notes.append(f"{rank_list(short)} recorded too few steps and are left out.")
    if run.is_sampled:
        count = len(kept[0].steps)
        total = kept[0].last_step - kept[0].first_step + 1
        notes.append(f"The record is long: {count:,} of {total:,} steps were read, in windows.")
    damaged = sum(rank.num_damaged for rank in run.ranks)
    if damaged:
        notes.append(f"{damaged} damaged lines were left out.")
    restarted = [rank.start.rank for rank in run.ranks if rank.num_starts > 1]
    if restarted:
        notes.append(f"{rank_list(restarted)} started again; only what followed is shown.")
    return notes


def duration(seconds: float) -> str:
    """Format seconds, as ``1.20 s``, ``3.4 ms`` or ``50 µs``."""
    if abs(seconds) >= 0.99995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) >= 0.9995e-3 else f"{seconds * 1e6:.0f} µs"


def megabytes(nbytes: float) -> str:
    """Format bytes, as ``1,234.56 MB``."""
    return f"{nbytes / 1e6:,.2f} MB"


def bits(bytes_per_s: float) -> str:
    """Format a rate in bits per second, as ``9.41 Gb/s``."""
    rate = 8 * bytes_per_s
    return f"{rate / 1e9:.2f} Gb/s" if rate >= 1e8 else f"{rate / 1e6:.2f} Mb/s"


def rank_list(ranks: list[int]) -> str:
    """Format a list of ranks, as ``Ranks 0-3 and 7``."""
    return ("Rank " if len(ranks) == 1 else "Ranks ") + number_list(ranks)


def number_list(numbers: list[int], *, max_parts: int = 8) -> str:
    """Format a list of numbers, as ``0-3 and 7``."""
    words = spans(numbers)
    if len(words) > max_parts:
        words = [*words[:max_parts], f"others, {len(numbers)} in all"]
    return listed(words)


def listed(words: list[str]) -> str:
    """Join words, as ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
