"""What many ranks cost: whole jobs, the launcher, communicators and the report, up to thousands.

Many idle ranks run on one machine. What grows with the number of ranks is fitted by
a + b N + c N^2 with coefficients that are not negative, and extrapolated. Every part names what
its figures are of: with two cores, seconds of 256 ranks are mostly those of waiting for a core.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from record import RECORDS, Bar, environment, report
from scipy.optimize import nnls

PARTS = ("control", "report", "exchange", "job")
NUM_RANKS = {
    "control": (64, 256, 1000, 4000, 9000),
    "report": (8, 64, 256, 1000),
    "exchange": (8, 32, 64, 128, 256),
    "job": (16, 64, 256),
}
KINDS = ["end", "hang", "failure"]
MAX_CONNECTED = 128
"""More ranks than this are not all connected with each other here: that takes gigabytes."""
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
    scale = importlib.import_module("scale.control")
    found = {}
    for n in numbers:
        if n < scale.num_descriptors() - 100:
            found[n] = scale.run_control(n)
            _say(f"launcher, {n} ranks", found[n])
    for key, what in (
        ("connect_cpu_s", "to accept all agents and start their scripts"),
        ("output_cpu_s", "to show a line of each rank"),
        ("hang_cpu_s", "to ask all ranks and name the one that hangs"),
        ("end_cpu_s", "to end all ranks"),
    ):
        bars += _fitted(f"launcher's processor, {what}", found, key, "s")
    return {str(n): row for n, row in found.items()}


def _report(numbers: list[int], bars: list[Bar]) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.unit.recorded_runs import ImitatedRun

    from torchmn.profiling.run_reader import read_run
    from torchmn.report.summary import summarize

    found: dict[int, dict[str, float]] = {}
    for n in numbers:
        with tempfile.TemporaryDirectory() as folder:
            run = ImitatedRun(num_ranks=n, ranks_per_host=8, num_steps=40).write(Path(folder))
            nbytes = sum(path.stat().st_size for path in run.rglob("*.jsonl"))
            began = time.process_time()
            summarize(read_run(run))
            found[n] = {"report_s": time.process_time() - began, "bytes": nbytes}
        _say(f"report, {n} ranks, 40 steps", found[n])
    bars += _fitted("torchmn report of 40 steps", found, "report_s", "s")
    return {str(n): row for n, row in found.items()}


def _exchange(numbers: list[int], bars: list[Bar]) -> dict[str, Any]:
    scale = importlib.import_module("scale.exchange")
    found: dict[str, dict[int, dict[str, float]]] = {"as needed": {}, "all connected": {}}
    for n in numbers:
        for side, rows in found.items():
            if side == "as needed" or n <= MAX_CONNECTED:
                rows[n] = scale.run_exchange(n, connects_all=side == "all connected")
                _say(f"communicator 'flat', {side}, {n} ranks", rows[n])
    for side, rows in found.items():
        for key, unit in (("sockets", "sockets"), ("first_s", "s"), ("allgather_obj_s", "s")):
            bars += _fitted(f"{side}: {key} of a rank", rows, key, unit)
    return {side: {str(n): row for n, row in rows.items()} for side, rows in found.items()}


def _job(numbers: list[int], bars: list[Bar]) -> dict[str, Any]:
    scale = importlib.import_module("scale.job")
    found = {}
    for n in numbers:
        kinds = KINDS if n == max(numbers) else ["end"]
        for kind in kinds:
            row = found[f"{n} {kind}"] = scale.run_job(n, kind)
            _say(f"job of {n} ranks, {kind}", row)
            bars.append(_limited(f"{n} ranks, until all have met", row["start_s"], START_S))
            if kind == "hang":
                late_s = row["end_s"] - scale.LIMIT_S
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
