"""Exchanges over slow links: torchmn beside its peers on test hosts, VGG-16 for CIFAR.

    bench_exchange.py [--lines PATTERN,...] [--sides PATTERN;...] [--units N] [--patience S]
    bench_exchange.py --list | --report

All sides of a line of the table (`exchange/table.py`) live in the same workers and take turns.
Every run is kept in `records/exchange.jsonl`, so that the table can be gathered in parts, and a
limit is judged on the newest few runs (`exchange/runs.py`). A codec or schedule that does not pass
the accuracy table is shown, but no limit is held by it. Needs Linux and root.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from fnmatch import fnmatch

from exchange.runs import RECORD, append, load
from exchange.table import LINES, SIDES, Line
from record import environment, report

NUM_UNITS = 7
PATIENCE_S = 10.0


def main() -> int:
    arguments = _parse()
    lines = [line for line in LINES.values() if _is_wanted(line.name, arguments.lines)]
    if arguments.list:
        _print_table(lines)
        return 0
    if arguments.report:
        return _report()
    if not lines:
        print(f"There is no line {arguments.lines}; see --list.", file=sys.stderr)
        return 2
    from torchmn.testing.netlab import missing_requirement

    if reason := missing_requirement():
        print(f"Test hosts cannot be made here: {reason}.", file=sys.stderr)
        return 2
    from exchange.conductor import measure
    from exchange.crews import WorkersLostError

    for line in lines:
        wanted = [side for side in line.sides if _is_wanted(side, arguments.sides)]
        if not wanted:
            continue
        if line.baseline:
            wanted.insert(0, line.baseline)
        try:
            run = measure(
                line, wanted, _say, num_units=arguments.units, patience_s=arguments.patience
            )
        except WorkersLostError as error:
            _say(f"{line.name}: given up: {error}")
            continue
        when = datetime.now(UTC).isoformat(timespec="seconds")
        append(RECORD, line.name, {"date": when, "environment": environment(), **run})
    return _report()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lines", "--settings", default="*", help="names or patterns, with ,")
    parser.add_argument("--sides", default="*", help="names or patterns, with ;")
    parser.add_argument("--units", type=int, default=NUM_UNITS, help="turns of every side")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        help="seconds to wait before a turn for other programs to leave the processors alone",
    )
    parser.add_argument("--list", action="store_true", help="print the table and end")
    parser.add_argument("--report", action="store_true", help="report what was measured before")
    arguments = parser.parse_args()
    arguments.lines = arguments.lines.split(",")
    arguments.sides = arguments.sides.split(";")
    return arguments


def _is_wanted(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _say(text: str) -> None:
    print(text, flush=True)


def _print_table(lines: list[Line]) -> None:
    for line in lines:
        setting = f"{line.num_hosts} hosts x {line.workers_per_host}, {line.rate or 'no limit'}"
        print(f"{line.name}  ({setting})")
        for side in line.sides:
            print(f"    {side}  [{SIDES[side].build}]")
        for limit in line.limits:
            print(f"    limit: {limit}")


def _report() -> int:
    from accuracy.bars import verdicts
    from accuracy.choice import chosen
    from accuracy.experiments import CHOICE, TABLE
    from exchange.bars import bars_of
    from exchange.counted import counted_by
    from exchange.figure import draw

    lines = load(RECORD)
    bars = bars_of(lines, counted_by(verdicts(TABLE.runs(), chosen(CHOICE.runs()))))
    status = report("exchange", bars)
    for name, runs in lines.items():
        said = {side: why for run in runs for side, why in run["sides"].items()}
        for side, why in said.items():
            if why != "measured":
                print(f"{name}: {side}: {why}")
    print(f"drawn: {draw(bars)}")
    return status


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        from exchange.worker import serve

        serve(sys.argv[2])
    else:
        raise SystemExit(main())
