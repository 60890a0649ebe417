"""Random faults at random moments of a training: does it end promptly, and resume exactly?

    make chaos RUNS=50 SEED=1

Every run trains the digits (`chaos/training.py`) on 2 to 4 workers, one fault is injected, and the
training is resumed. Each run is appended to `records/chaos.jsonl` as a line; the table covers all
of them. A seed and the number of a run repeat the run.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import time
from pathlib import Path

from chaos import table
from chaos.expectations import hang_limit_s
from chaos.faults import draw
from chaos.run import ReferenceFailedError, References, run
from chaos.testbed import has_cgroups, has_disks, has_hosts, open_testbed
from record import OUT, RECORDS, environment, report

RESULTS = RECORDS / "chaos.jsonl"
WORK = OUT / "chaos"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--runs", type=int, default=10, help="number of runs")
    add("--seed", type=int, default=int(time.time()), help="seed of the runs")
    add("--first", type=int, default=0, help="number of the first run")
    add("--only", default="", help="only faults or settings whose names contain this")
    add("--results", type=Path, default=RESULTS, help="file to append the runs to")
    add("--report", action="store_true", help="report the recorded runs without new ones")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that context managers clean up
    if not options.report:
        run_all(options)
    records = table.read(options.results)
    table.show(records)
    return report("chaos", table.bars(records))


def run_all(options: argparse.Namespace) -> None:
    """The runs, one after another."""
    available = []
    for name, is_there in (("hosts", has_hosts), ("disks", has_disks), ("cgroups", has_cgroups)):
        if is_there():
            available.append(name)
        else:
            print(f"chaos: running without {name}, which require root.", file=sys.stderr)
    references = References(WORK / "references")
    options.results.parent.mkdir(parents=True, exist_ok=True)
    transcripts = WORK / "transcripts"
    transcripts.mkdir(parents=True, exist_ok=True)
    commit = environment()["commit"]
    num_left, number = options.runs, options.first - 1
    with open_testbed() as testbed:
        while num_left:
            number += 1
            setting, fault = draw(options.seed, number, available)
            if options.only not in fault.kind and options.only not in setting.name:
                continue
            num_left -= 1
            transcript = transcripts / f"{options.seed}-{number}.txt"
            transcript.unlink(missing_ok=True)
            print(f"{options.seed}:{number} {setting.name}, {fault.kind} {fault.when}", flush=True)
            try:
                found = run(setting, fault, testbed, references, transcript)
            except ReferenceFailedError as error:
                print(f"chaos: the reference run failed: {error}", file=sys.stderr, flush=True)
                continue
            found = {
                "seed": options.seed,
                "number": number,
                "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "commit": commit,
                "hang_limit_s": hang_limit_s(fault, setting),
                **found,
            }
            table.append(options.results, found)
            outcome = "; ".join(found["problems"])[:200] or "good"
            shown = {
                key: found.get(key)
                for key in ("status", "detection_s", "end_s", "resumed_at", "seconds")
            }
            print(f"    {outcome} {shown}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
