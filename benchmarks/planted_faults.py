"""What benchmarks with planted faults share: the command line, the records and their bars.

A seed and the number of a trial repeat it; each is appended to the records, with its ``kind``
(``healthy`` without a fault) and ``is_right``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from record import RECORDS, Bar, environment, report
from tests.netlab import missing_requirement

FaultLike = TypeVar("FaultLike")
Record = dict[str, Any]


def run_benchmark(
    name: str,
    *,
    about: str,
    passes: int,
    trials: Callable[[argparse.Namespace], Iterable[tuple[int, FaultLike | None]]],
    trial: Callable[[int, int, FaultLike | None], Record],
    shown: Callable[[Record], str],
    bars: Callable[[list[Record]], list[Bar]],
) -> int:
    """Run the trials that the command line asks for, and report all that are recorded.

    ``trials`` numbers them, with their faults; ``trial`` runs one from seed, number and fault.
    """
    options = _parse_options(about, passes, RECORDS / f"{name}.jsonl")
    if not options.report:
        if reason := missing_requirement():
            print(f"{name}: {reason}", file=sys.stderr)
            return 1
        options.results.parent.mkdir(parents=True, exist_ok=True)
        commit = environment()["commit"]
        for number, fault in trials(options):
            found = trial(options.seed, number, fault)
            with options.results.open("a") as file:
                file.write(json.dumps({"commit": commit, "seed": options.seed, **found}) + "\n")
            word = "right" if found["is_right"] else "WRONG"
            print(f"{options.seed}:{number} {found['kind']}: {word} {shown(found)}", flush=True)
    lines = options.results.read_text().splitlines()
    return report(name, bars([json.loads(line) for line in lines]))


def _parse_options(about: str, passes: int, results: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    add = parser.add_argument
    add("--seed", type=int, default=int(time.time()), help="seed of the trials")
    add("--passes", type=int, default=passes, help="how often each kind of fault is planted")
    add("--healthy", type=int, default=20, help="number of trials without a fault")
    add("--only", default="", help="only faults whose kinds contain this")
    add("--results", type=Path, default=results, help="file to append the trials to")
    add("--report", action="store_true", help="report the recorded trials without new ones")
    return parser.parse_args()


def with_faults(records: list[Record]) -> list[Record]:
    """The records of trials with a fault."""
    return [each for each in records if each["kind"] != "healthy"]


def bars_of_faults(records: list[Record]) -> list[Bar]:
    """How many were named, over all recorded trials, and by kind; nothing without a fault."""
    planted = with_faults(records)
    if not planted:
        return []
    share = sum(each["is_right"] for each in planted) / len(planted)
    named = Counter(each["kind"] for each in planted if each["is_right"])
    return [
        Bar("faults named with their place", share, "of trials", ">= 0.95", share >= 0.95),
        Bar("trials with a fault", len(planted), ""),
        *[
            Bar(kind, named[kind], f"of {number} named")
            for kind, number in Counter(each["kind"] for each in planted).items()
        ],
    ]


def bars_of_alarms(records: list[Record]) -> list[Bar]:
    """Alarms in healthy trials; nothing without one."""
    healthy = [each for each in records if each["kind"] == "healthy"]
    if not healthy:
        return []
    alarms = sum(not each["is_right"] for each in healthy)
    return [
        Bar("healthy trials", len(healthy), "", ">= 20", len(healthy) >= 20),
        Bar("healthy trials with an alarm", alarms, "", "<= 0", alarms == 0),
    ]
