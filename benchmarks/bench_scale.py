"""What many ranks cost the launcher, and whole jobs.

Many idle ranks run on one machine. What grows with the number of ranks is fitted by
a + b N + c N^2 with coefficients that are not negative, and extrapolated. Every part names what
its figures are of: with two cores, seconds of 256 ranks are mostly those of waiting for a core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from record import RECORDS, Bar, environment, report
from scale import control, job
from scipy.optimize import nnls

PARTS = ("control", "job")
NUM_RANKS = {
    "control": (64, 256, 1000, 4000, 9000),
    "job": (16, 64, 256),
}
KINDS = ["end", "hang", "failure"]
EXTRAPOLATED = (64, 1000, 10_000)
START_S, HANG_S, END_S = 60.0, 10.0, 10.0
RECORD = RECORDS / "scale.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", nargs="+", type=int, help="in place of the usual numbers")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=KINDS, help="of large jobs")
    options = parser.parse_args()
    KINDS[:] = options.kinds
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    bars: list[Bar] = []
    for part in options.parts:
        measured = globals()[f"_{part}"](options.ranks or NUM_RANKS[part], bars)
        record[part] = {"environment": environment(), "measured": measured}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return report("scale", bars)


def _control(numbers: list[int], bars: list[Bar]) -> dict[str, Any]:
    found = {}
    for n in numbers:
        if n < control.num_descriptors() - 100:
            found[n] = control.run_control(n)
            _say(f"launcher, {n} ranks", found[n])
    for key, what in (
        ("connect_cpu_s", "to accept all agents and start their scripts"),
        ("output_cpu_s", "to show a line of each rank"),
        ("hang_cpu_s", "to ask all ranks and name the one that hangs"),
        ("end_cpu_s", "to end all ranks"),
    ):
        bars += _fitted(f"launcher's processor, {what}", found, key, "s")
    return {str(n): row for n, row in found.items()}


def _job(numbers: list[int], bars: list[Bar]) -> dict[str, Any]:
    found = {}
    for n in numbers:
        kinds = KINDS if n == max(numbers) else ["end"]
        for kind in kinds:
            row = found[f"{n} {kind}"] = job.run_job(n, kind)
            _say(f"job of {n} ranks, {kind}", row)
            bars.append(_limited(f"{n} ranks, until all have met", row["start_s"], START_S))
            if kind == "hang":
                late_s = row["end_s"] - job.LIMIT_S
                bars.append(_limited(f"{n} ranks, hang named and ended after its limit", late_s,
                                     HANG_S, row["is_named"] == 1.0))  # fmt: skip
            else:
                bars.append(_limited(f"{n} ranks, {kind}", row["end_s"], END_S,
                                     row["is_named"] == 1.0))  # fmt: skip
            bars.append(Bar(f"{n} ranks, {kind}: processes left", row["left"], "", "== 0",
                            row["left"] == 0))  # fmt: skip
    return found


def _limited(name: str, seconds: float, limit_s: float, is_right: bool = True) -> Bar:
    return Bar(name, seconds, "s", f"<= {limit_s:g}", is_right and seconds <= limit_s)


def _fitted(what: str, found: Mapping[int, Mapping[str, float]], key: str, unit: str) -> list[Bar]:
    """The largest measured value, and those that the fit gives for other numbers of ranks."""
    if len(found) < 3:
        return []
    n = np.array(sorted(found), dtype=float)
    y = np.array([found[int(each)][key] for each in n])
    scale = np.array([1.0, n.max(), n.max() ** 2])
    weights = 1.0 / np.maximum(y, y.max() * 1e-3)  # relative errors count
    terms = np.stack([np.ones_like(n), n, n**2], axis=1) / scale
    a, b, c = nnls(terms * weights[:, None], y * weights)[0] / scale
    bars = [Bar(f"{what}, {int(n.max())} ranks, measured", float(y[-1]), unit)]
    for number in EXTRAPOLATED:
        value = float(a + b * number + c * number**2)
        bars.append(Bar(f"{what}, {number} ranks, {a:.2g} + {b:.2g} N + {c:.2g} N^2", value, unit))
    return bars


def _say(title: str, row: Mapping[str, float]) -> None:
    shown = ", ".join(f"{key} {value:.4g}" for key, value in row.items())
    print(f"{title}: {shown}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
