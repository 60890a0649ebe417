"""Faults planted on test hosts: does `torchmn doctor` name fault and place, and nothing else?

    make bench-doctor ARGS="--seed 1"

Each kind of fault (`doctor/faults.py`) is planted once per pass on test hosts whose number and
links are drawn at random, as is its strength; healthy hosts are examined as often as asked for.
A seed and the number of a trial repeat the trial. Each is appended to `records/doctor.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from doctor.faults import BASE_RATES, FAULTS, Fault, draw
from doctor.testbed import Testbed
from record import RECORDS, Bar, environment, report
from tests.netlab import missing_requirement

Record = dict[str, Any]


def main() -> int:
    options = _parse()
    if not options.report:
        if reason := missing_requirement():
            print(f"doctor: {reason}", file=sys.stderr)
            return 1
        commit = environment()["commit"]
        for number, fault in _trials(options):
            found = _trial(options.seed, number, fault)
            with options.results.open("a") as file:
                file.write(json.dumps({"commit": commit, "seed": options.seed, **found}) + "\n")
            word = "right" if found["is_right"] else "WRONG"
            shown = f"in {found['seconds']} s: {' | '.join(found['alarms'])[:300]}"
            print(f"{options.seed}:{number} {found['kind']}: {word} {shown}", flush=True)
    lines = options.results.read_text().splitlines()
    return report("doctor", _bars([json.loads(line) for line in lines]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--seed", type=int, default=int(time.time()), help="seed of the trials")
    add("--passes", type=int, default=1, help="how often each kind of fault is planted")
    add("--healthy", type=int, default=20, help="number of trials without a fault")
    add("--only", default="", help="only faults whose kinds contain this")
    add("--results", type=Path, default=RECORDS / "doctor.jsonl", help="file of the trials")
    add("--report", action="store_true", help="report the recorded trials without new ones")
    return parser.parse_args()


def _trials(options: argparse.Namespace) -> list[tuple[int, Fault | None]]:
    planted: list[tuple[int, Fault | None]] = []
    for number in range(options.passes * len(FAULTS)):
        fault, _ = draw(options.seed, number)
        if options.only in fault.kind:
            planted.append((number, fault))
    return planted + [(10_000 + number, None) for number in range(options.healthy)]


def _trial(seed: int, number: int, fault: Fault | None) -> Record:
    """Examine test hosts with a fault, or without."""
    chance = random.Random(f"{seed}:{number}")
    num_hosts = chance.choice(fault.num_hosts if fault else (2, 3, 4))
    rate = chance.choice(BASE_RATES)
    with ExitStack() as stack:
        has_own_cores = fault is not None and fault.has_own_cores
        bed = Testbed(stack, num_hosts, rate, has_own_cores=has_own_cores)
        host = chance.choice(bed.hosts[1:])
        places = fault.plant(bed, host, chance) if fault else set()
        found = bed.examine()
    alarms = [each for each in found["findings"] if each["severity"] != "note"]
    return {
        "number": number,
        "kind": fault.kind if fault else "healthy",
        "stand_in": fault.stand_in if fault else "",
        "num_hosts": num_hosts,
        "rate": rate,
        "places": sorted(places),
        "is_right": fault.is_named(found, places) if fault else not alarms,
        "others": [each["seen"] for each in alarms if fault and not set(each["hosts"]) <= places],
        "alarms": [f"{each['hosts']} {each['seen']}" for each in alarms],
        "status": found["status"],
        "seconds": round(found["seconds"], 1),
    }


def _bars(records: list[Record]) -> list[Bar]:
    """Over all recorded trials of the kinds that there are."""
    kinds = {fault.kind for fault in FAULTS}
    planted = [each for each in records if each["kind"] in kinds]
    healthy = [each for each in records if each["kind"] == "healthy"]
    bars = []
    if planted:
        share = sum(each["is_right"] for each in planted) / len(planted)
        named = Counter(each["kind"] for each in planted if each["is_right"])
        counts = Counter(each["kind"] for each in planted)
        stand_ins = {each["kind"] for each in planted if each["stand_in"]}
        others = sum(bool(each["others"]) for each in planted)
        bars += [
            Bar("faults named with their place", share, "of trials", ">= 0.95", share >= 0.95),
            Bar("trials with a fault", len(planted), ""),
            *[Bar(kind, named[kind], f"of {number} named") for kind, number in counts.items()],
            Bar("kinds of faults", len(counts), "", ">= 20", len(counts) >= 20),
            Bar("of these by a stand-in", len(stand_ins), ""),
            Bar("trials in which another host was named as well", others, ""),
        ]
    if healthy:
        alarms = sum(not each["is_right"] for each in healthy)
        bars += [
            Bar("healthy trials", len(healthy), "", ">= 20", len(healthy) >= 20),
            Bar("healthy trials with an alarm", alarms, "", "<= 0", alarms == 0),
        ]
    seconds = [each["seconds"] for each in planted + healthy if each["num_hosts"] == 4]
    if seconds:
        longest = max(seconds)
        bars.append(
            Bar("examination of 4 hosts, longest", longest, "s", "<= 60", longest <= 60, seconds)
        )
    return bars


if __name__ == "__main__":
    raise SystemExit(main())
