"""Compare two runs: whether the second one is slower, and in which phase.

Two numbers of each run are compared, with their phases: the median step, which is typical, and the
mean step, which includes evaluations, checkpoints and rare slow steps. The interval of a difference
holds 95 % of the differences between runs that are resampled from these two, in blocks of
consecutive steps, since steps that follow each other resemble each other (circular block bootstrap:
D. Politis and J. Romano, 1992). Only a difference whose whole interval is above `MIN_SHARE` of a
step counts.

What differs between runs of the same code, such as where the system has placed them, is not noise
within a run, and the interval does not contain it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from torchmn.base.errors import DataError
from torchmn.observe.read.recorded_run import Floats, Integers
from torchmn.observe.report.finding import MIN_SHARE
from torchmn.observe.report.summary import Summary, duration, listed
from torchmn.record.records import PHASES

MIN_STEPS = 20
_MAX_STEPS = 4000  # of a run that are resampled: of more every second, third, ... is taken
_NUM_RESAMPLES = 1000
_CONFIDENCE = 95.0
_SAMPLES_TOLERANCE = 1e-3

Statistic = Literal["median", "mean"]
Verdict = Literal["slower", "faster", "no difference"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Seconds of a step, or of a phase of it, in both runs, and the interval of B minus A."""

    statistic: Statistic
    what: str
    a_s: float
    b_s: float
    low_s: float
    high_s: float

    @property
    def text(self) -> str:
        """The difference and its interval."""
        apart, low, high = map(_signed, (self.b_s - self.a_s, self.low_s, self.high_s))
        return f"{apart} ({low} to {high})"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Whether run B is slower than run A. ``differences`` begin with that of the median step."""

    a: str
    b: str
    verdict: Verdict
    differences: tuple[Difference, ...]
    changed: dict[str, tuple[str, str]]  # settings and versions

    def step(self, statistic: Statistic) -> Difference:
        """The difference of the whole step."""
        return next(d for d in self.differences if (d.statistic, d.what) == (statistic, "step"))

    @property
    def text(self) -> str:
        """The runs, the verdict with the numbers on which it rests, and the phases that differ."""
        sentences = [f"A is {self.a}", f"B is {self.b}", self._verdict_text]
        for statistic in _STATISTICS:
            step = self.step(statistic)
            share = 100 / step.a_s
            sentences.append(
                f"{statistic.capitalize()} step: {duration(step.a_s)} and {duration(step.b_s)}, "
                f"{share * (step.b_s - step.a_s):+.1f} % ({share * step.low_s:+.1f} to "
                f"{share * step.high_s:+.1f} %)."
            )
        for sign, word in ((1, "longer"), (-1, "shorter")):
            if found := self._phases(sign):
                named = [f"{each.what} {each.text}" for each in found]
                sentences.append(f"Phases that are {word} in B: {listed(named)}.")
        if self.changed:
            named = [f"{name} ({one}, {two})" for name, (one, two) in self.changed.items()]
            sentences.append(f"The settings of the runs differ in {listed(named)}.")
        return "\n".join(sentences)

    @property
    def _verdict_text(self) -> str:
        if self.verdict == "no difference":
            most = max(100 * each.high_s / each.a_s for each in map(self.step, _STATISTICS))
            most = max(most, 100 * MIN_SHARE)
            return (
                "No difference can be seen within the noise: B is less than "
                f"{most:.1f} % slower than A."
            )
        return f"B is {self.verdict} than A."

    def _phases(self, sign: int) -> list[Difference]:
        """Return the phases that have surely become longer (1) or shorter (-1), the most first."""
        least = MIN_SHARE * self.step("median").a_s
        found: dict[str, Difference] = {}
        for each in self.differences:
            surely = each.low_s if sign > 0 else -each.high_s
            if each.what != "step" and surely > 0 and sign * (each.b_s - each.a_s) > least:
                found.setdefault(each.what, each)
        return sorted(found.values(), key=lambda each: -sign * (each.b_s - each.a_s))


_STATISTICS: tuple[Statistic, ...] = get_args(Statistic)


def compare(a: Summary, b: Summary) -> Comparison:
    """Compare two runs of the same training on equally many ranks.

    Raises DataError: they cannot be compared.
    """
    _raise_if_incomparable(a, b)
    rng = np.random.default_rng(0)
    both = _steps(a), _steps(b)
    one, two = map(_statistics, both)
    before, after = (_resamples(steps, rng) for steps in both)
    margin = (100 - _CONFIDENCE) / 2
    low, high = np.percentile(after - before, [margin, 100 - margin], axis=0)
    differences = [
        Difference(
            statistic=statistic,
            what=what,
            a_s=float(one[row, column]),
            b_s=float(two[row, column]),
            low_s=float(low[row, column]),
            high_s=float(high[row, column]),
        )
        for row, statistic in enumerate(_STATISTICS)
        for column, what in enumerate(("step", *PHASES))
    ]
    whole = [each for each in differences if each.what == "step"]
    verdict: Verdict = "no difference"
    if any(each.low_s > MIN_SHARE * each.a_s for each in whole):
        verdict = "slower"
    elif any(-each.high_s > MIN_SHARE * each.a_s for each in whole):
        verdict = "faster"
    return Comparison(
        a=str(a.run.folder),
        b=str(b.run.folder),
        verdict=verdict,
        differences=tuple(differences),
        changed=_changed(a, b),
    )


def _raise_if_incomparable(a: Summary, b: Summary) -> None:
    why = ""
    short = next((each for each in (a, b) if len(each.steady) < MIN_STEPS), None)
    samples = [float(each.column("samples").mean()) for each in (a, b)]
    if short is not None:
        why = (
            f"{short.run.folder} has {len(short.steady)} steps after its warm-up, and at least "
            f"{MIN_STEPS} are needed"
        )
    elif abs(samples[0] - samples[1]) > _SAMPLES_TOLERANCE * samples[0]:
        why = f"a step of a rank has {samples[0]:g} samples in A, and {samples[1]:g} in B"
    if why:
        raise DataError(f"{a.run.folder} (A) and {b.run.folder} (B) cannot be compared: {why}.")


def _steps(summary: Summary) -> Floats:
    """Return seconds of each steady step and of its phases, shape ``(steps, 1 + phases)``.

    The phases are those of the rank for which the others wait in that step: where it is late, its
    own phase shows it, and the exchange of the others does not count.
    """
    waited = summary.of("exchange")
    last = waited.argmin(1)
    phases = summary.steady[np.arange(len(last)), last]
    both = np.column_stack([phases.sum(1), phases])
    return np.asarray(both[:: len(both) // _MAX_STEPS + 1], dtype=np.float64)


def _statistics(steps: Floats) -> Floats:
    """Return the median and the mean of each column, in the order of `_STATISTICS`."""
    return np.array([np.median(steps, axis=0), steps.mean(0)])


def _resamples(steps: Floats, rng: np.random.Generator) -> Floats:
    """Return the `_statistics` of resampled runs, shape ``(resamples, statistics, columns)``."""
    count = len(steps)
    length = max(1, round(count**0.5))
    found = []
    for _ in range(_NUM_RESAMPLES):
        starts = rng.integers(0, count, -(-count // length))
        rows: Integers = (starts[:, None] + np.arange(length)).ravel()[:count] % count
        found.append(_statistics(steps[rows]))
    return np.array(found)


def _changed(a: Summary, b: Summary) -> dict[str, tuple[str, str]]:
    """Return the settings and versions that differ, without the words that say why."""
    one, two = a.settings_and_versions, b.settings_and_versions
    return {
        name: (one[name], two[name])
        for name in one
        if name not in ("reason", "topology") and name in two and one[name] != two[name]
    }


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{duration(abs(seconds))}"
