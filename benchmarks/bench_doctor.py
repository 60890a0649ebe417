"""Faults planted on test hosts: does `torchmn doctor` name fault and place, and nothing else?

    make bench-doctor ARGS="--seed 1"

Each kind of fault (`doctor/faults.py`) is planted once per pass on test hosts whose number and
links are drawn at random, as is its strength; healthy hosts are examined as often as asked for.
A seed and the number of a trial repeat the trial. Each is appended to `records/doctor.jsonl`.
"""

from __future__ import annotations

import argparse
import os
import random
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from doctor.faults import BASE_RATES, FAULTS, Fault, draw
from doctor.testbed import Testbed
from planted_faults import bars_of_alarms, bars_of_faults, run_benchmark, with_faults
from record import Bar


def go_first() -> None:
    """Run before other programs of this machine, whose load would be found, and rightly so."""
    os.nice(-20)
    with suppress(OSError):  # sessions are groups of the scheduler, on some systems
        Path("/proc/self/autogroup").write_text("-20")


def trials(options: argparse.Namespace) -> list[tuple[int, Fault | None]]:
    go_first()
    planted: list[tuple[int, Fault | None]] = []
    for number in range(options.passes * len(FAULTS)):
        fault, _ = draw(options.seed, number)
        if options.only in fault.kind:
            planted.append((number, fault))
    return planted + [(10_000 + number, None) for number in range(options.healthy)]


def trial(seed: int, number: int, fault: Fault | None) -> dict[str, Any]:
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


def shown(found: dict[str, Any]) -> str:
    return f"in {found['seconds']} s: {' | '.join(found['alarms'])[:300]}"


def bars(records: list[dict[str, Any]]) -> list[Bar]:
    """Over all recorded trials."""
    faults = with_faults(records)
    found = bars_of_faults(records)
    if faults:
        kinds = {each["kind"] for each in faults}
        stand_ins = {each["kind"] for each in faults if each["stand_in"]}
        others = sum(bool(each["others"]) for each in faults)
        found += [
            Bar("kinds of faults", len(kinds), "", ">= 20", len(kinds) >= 20),
            Bar("of these by a stand-in", len(stand_ins), ""),
            Bar("trials in which another host was named as well", others, ""),
        ]
    found += bars_of_alarms(records)
    seconds = [each["seconds"] for each in records if each["num_hosts"] == 4]
    if seconds:
        longest = max(seconds)
        found.append(
            Bar("examination of 4 hosts, longest", longest, "s", "<= 60", longest <= 60, seconds)
        )
    return found


if __name__ == "__main__":
    raise SystemExit(
        run_benchmark(
            "doctor", about=__doc__, passes=1, trials=trials, trial=trial, shown=shown, bars=bars
        )
    )
