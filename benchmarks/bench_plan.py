"""`torchmn plan` against measured steps, and the source documents' tables beside the model.

    bench_plan.py [--units N] [--cases PATTERN] [--quiet-timeout S]
    bench_plan.py --report          # from the measured turns, without measuring

Facts (a step without exchange, gradient times, codecs, the link) are measured on two test hosts
over 10 Gb/s; the costs of an exchange are found from the steps of a few fitted cases; every other
case of `plan/settings.py` is predicted and measured in the same run. Before each turn two hosts
take steps without exchange: a prediction begins from what a step takes at that time, since the
speed of a machine that is shared with others drifts. Needs Linux and root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from record import OUT, Bar, report

if TYPE_CHECKING:
    from exchange.deployment import Deployment
    from exchange.table import Line
    from plan.settings import Case

FILE = OUT / "plan_turns.json"
NUM_UNITS = 3
NUM_FACT_STEPS = 12
FACTS_RATE = "10gbit"
MEDIAN_LIMIT, WORST_LIMIT = 0.05, 0.10
MIN_CASES = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--units", type=int, default=NUM_UNITS, help="turns of every case")
    parser.add_argument("--cases", default="*", help="names or patterns, separated by semicolons")
    parser.add_argument("--quiet-timeout", type=float, default=10.0)
    parser.add_argument("--report", action="store_true", help="report without measuring")
    arguments = parser.parse_args()
    if not arguments.report:
        from tests.netlab import missing_requirement

        if reason := missing_requirement():
            print(f"Test hosts are not available: {reason}.")
            return 2
        _measure(arguments.cases.split(";"), arguments.units, arguments.quiet_timeout)
    from plan.sources import source_bars

    return report("plan", [*_bars(json.loads(FILE.read_text())), *source_bars()])


def _measure(patterns: list[str], num_units: int, quiet_timeout_s: float) -> None:
    """Measure facts and turns. The file is written after each turn."""
    from exchange.deployment import deployed
    from exchange.table import BASELINE, Line
    from plan.settings import CASES

    cases = [c for c in CASES if c.is_fitted or any(fnmatch(c.name, p) for p in patterns)]
    OUT.mkdir(exist_ok=True)
    alone = Line(name="alone", sides=(BASELINE,), rate=FACTS_RATE)
    with deployed(alone, {"torch"}) as reference:
        workers = reference.workers_of(BASELINE)
        workers.request("build", side=BASELINE)
        measured: dict[str, Any] = {
            "facts": workers.request("facts", num_steps=NUM_FACT_STEPS),
            "turns": [],
        }
        for num_hosts in sorted({case.num_hosts for case in cases}):  # all at once need 15 GB
            chosen = [case for case in cases if case.num_hosts == num_hosts]
            sides = tuple(dict.fromkeys(case.side for case in chosen))
            line = Line(name=f"{num_hosts} hosts", sides=sides, num_hosts=num_hosts)
            with deployed(line, {"torch"}) as deployment:
                for side in sides:
                    print(f"building {line.name}: {side}", flush=True)
                    deployment.workers_of(side).request("build", side=side)
                for unit in range(num_units):
                    for case in chosen:
                        deployment.set_rate(case.rate)
                        measured["turns"].append(
                            _paired_turn(
                                (reference, alone), (deployment, line), case, unit, quiet_timeout_s
                            )
                        )
                        FILE.write_text(json.dumps(measured, indent=1) + "\n")


def _paired_turn(
    reference: tuple[Deployment, Line],
    deployment: tuple[Deployment, Line],
    case: Case,
    unit: int,
    quiet_timeout_s: float,
) -> dict[str, Any]:
    """A turn of a case just after one without exchange, repeated if others were disturbing."""
    from exchange.measurement import MAX_TURNS, QUIET_SHARE, turn, wait_for_quiet
    from exchange.table import BASELINE

    for _ in range(MAX_TURNS if quiet_timeout_s else 1):
        wait_for_quiet(quiet_timeout_s)
        before = turn(*reference, BASELINE, unit)
        found = turn(*deployment, case.side, unit)
        foreign_share = max(before["foreign_share"], found["foreign_share"])
        if foreign_share <= QUIET_SHARE:
            break
    print(
        f"unit {unit + 1}: {case.name}: {found['seconds'] * 1e3:.1f} ms, alone "
        f"{before['seconds'] * 1e3:.1f} ms, others used {foreign_share:.0%}",
        flush=True,
    )
    return {
        **found,
        "case": case.name,
        "alone_s": before["seconds"],
        "foreign_share": foreign_share,
    }


def _bars(measured: dict[str, Any]) -> list[Bar]:
    from plan.compare import described, ratios
    from plan.settings import CASES

    from torchmn.planning.prediction import predict_setting

    num_cores = len(os.sched_getaffinity(0))
    known = described(measured["facts"], measured["turns"], num_cores)
    costs = known.costs
    print(f"found from the fitted cases: {costs}")
    bars, errors = [], []
    for case in CASES:
        found = ratios(case, known, measured["turns"], num_cores)
        if not found:
            continue
        predicted = predict_setting(known, case.setting(num_cores))
        bars.append(
            Bar(
                f"{case.name}: predicted {predicted.seconds * 1e3:.0f} ms; measured / predicted"
                + (" (fitted)" if case.is_fitted else ""),
                statistics.median(found),
                "ratio",
                samples=found,
                interval=(min(found), max(found)),
            )
        )
        if not case.is_fitted:
            errors.append(abs(statistics.median(found) - 1))
    if errors:
        median, worst = statistics.median(errors), max(errors)
        bars += [
            Bar("cases that were not fitted", len(errors), "cases", f">= {MIN_CASES}",
                len(errors) >= MIN_CASES),
            Bar("median error of the predicted step", median, "share", f"<= {MEDIAN_LIMIT}",
                median <= MEDIAN_LIMIT, errors),
            Bar("worst error of the predicted step", worst, "share", f"<= {WORST_LIMIT}",
                worst <= WORST_LIMIT),
        ]  # fmt: skip
    return bars


if __name__ == "__main__":
    raise SystemExit(main())
