"""Gradient exchange over slow links: torchmn and its peers on test hosts, VGG-16 for CIFAR.

    bench_exchange.py [--lines PATTERN,...] [--sides PATTERN;...] [--units N] [--quiet-timeout S]
    bench_exchange.py --smoke [--lines ...] [--sides ...]
    bench_exchange.py --list | --report

All sides of a line of the table (`exchange/table.py`) are built in the same workers and take
turns. Every run is kept in `records/exchange.jsonl`, so that the table can be measured in parts,
and a limit is checked against the newest runs (`exchange/runs.py`). A codec or schedule that does
not pass the accuracy table is shown, but it satisfies no limit. Needs Linux and root.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

from exchange.runs import RECORD, append, load
from exchange.table import LINES, SIDES, Line
from record import environment, report

NUM_UNITS = 7
QUIET_TIMEOUT_S = 10.0


def main() -> int:
    arguments = _parse()
    lines = [line for line in LINES.values() if _is_wanted(line.name, arguments.lines)]
    if arguments.list:
        _print_table(lines)
        return 0
    if arguments.report:
        return _report(arguments.record)
    if arguments.smoke:
        os.environ["BENCH_SMOKE"] = "1"
        arguments.units, arguments.quiet_timeout = 1, 0.0
    if not lines:
        print(f"No line matches {arguments.lines}; see --list.", file=sys.stderr)
        return 2
    from tests.netlab import missing_requirement

    if reason := missing_requirement():
        print(f"Test hosts are not available: {reason}.", file=sys.stderr)
        return 2
    from exchange.deployment import WorkersLostError
    from exchange.measurement import measure

    failed = False
    for line in lines:
        wanted = [side for side in line.sides if _is_wanted(side, arguments.sides)]
        if not wanted:
            continue
        if line.baseline:
            wanted.insert(0, line.baseline)
        try:
            run = measure(
                line,
                wanted,
                _print,
                num_units=arguments.units,
                quiet_timeout_s=arguments.quiet_timeout,
            )
        except WorkersLostError as error:
            _print(f"{line.name}: aborted: {error}")
            failed = True
            continue
        if arguments.smoke:
            failed |= any(status.startswith("ended") for status in run["sides"].values())
            continue
        when = datetime.now(UTC).isoformat(timespec="seconds")
        append(arguments.record, line.name, {"date": when, "environment": environment(), **run})
    return int(failed) if arguments.smoke else _report(arguments.record)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--lines", "--settings", default="*", help="names or patterns, separated by commas [all]"
    )
    parser.add_argument(
        "--sides", default="*", help="names or patterns, separated by semicolons [all]"
    )
    parser.add_argument(
        "--units", type=int, default=NUM_UNITS, help="number of turns of every side [%(default)s]"
    )
    parser.add_argument(
        "--quiet-timeout",
        type=float,
        default=QUIET_TIMEOUT_S,
        help="maximum seconds to wait before a turn until other programs are idle [%(default)s]",
    )
    parser.add_argument(
        "--record",
        type=Path,
        default=RECORD,
        help="file of the runs; the figure is drawn from the default one only",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="one turn of every side with a small network, to see that it runs; keeps no record",
    )
    parser.add_argument("--list", action="store_true", help="print the table without measuring")
    parser.add_argument(
        "--report", action="store_true", help="report the recorded runs without measuring"
    )
    arguments = parser.parse_args()
    arguments.lines = arguments.lines.split(",")
    arguments.sides = arguments.sides.split(";")
    return arguments


def _is_wanted(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _print(text: str) -> None:
    print(text, flush=True)


def _print_table(lines: list[Line]) -> None:
    for line in lines:
        setting = f"{line.num_hosts} hosts x {line.workers_per_host}, {line.rate or 'no limit'}"
        print(f"{line.name}  ({setting})")
        for side in line.sides:
            print(f"    {side}  [{SIDES[side].build}]")
        for limit in line.limits:
            print(f"    limit: {limit}")


def _report(record: Path) -> int:
    from accuracy.bars import failed_limits
    from accuracy.experiments import RECIPES, TABLE
    from accuracy.recipes import failed_recipes
    from exchange.bars import bars_of
    from exchange.exclusions import exclusions_from
    from exchange.figure import draw

    lines = load(record)
    failed = failed_limits(TABLE.runs()) | failed_recipes(RECIPES.runs())
    bars = bars_of(lines, exclusions_from(failed))
    status = report("exchange", bars)
    for name, runs in lines.items():
        newest = {side: outcome for run in runs for side, outcome in run["sides"].items()}
        for side, outcome in newest.items():
            if outcome != "measured":
                print(f"{name}: {side}: {outcome}")
    if record == RECORD:
        print(f"drawn: {draw(bars)}")
    return status


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        from exchange.worker import serve

        serve(sys.argv[2])
    else:
        raise SystemExit(main())
