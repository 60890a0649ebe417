"""Fine-tuning with LoRA over 100 Mb/s: how many steps per second, and to which loss, beside DDP.

    bench_lora.py [--turns N] [--rate RATE] [--sides PATTERN;...] [--record FILE]
    bench_lora.py --report        # the recorded runs, without measuring
    bench_lora.py --choose        # losses of candidates on the other half of the text; no record
    bench_lora.py --smoke         # every side for a few steps; keeps no record

Two test hosts (needs root, TORCHMN_TEST_DATA, transformers and peft), a core and a thread each. All
sides have the same base model, adapters, order of sequences and AdamW, live in the same two
processes, and take turns of 20 steps; a turn ends when nothing of it is under way. A ratio is of
turns of the same round. At the end each side is validated, after the same number of samples.

The base model is trained once, for a minute, and kept in ``out``. ``benchmarks/records/lora.jsonl``
keeps every run, and a table is of the newest one. (A median of all turns: other programs on the
machine slow down computation, and `foreign_share` of each turn says how much they used.)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from record import OUT, RECORDS, Bar, environment, median_bar, ratio_bar, report

if TYPE_CHECKING:
    from lora.settings import Side

RECORD = RECORDS / "lora.jsonl"
BASE = OUT / "lora_base.pt"
SCRIPT = str(Path(__file__).resolve())
FAST_RATE = "10gbit"
SMOKE_STEPS = 4
Run = dict[str, Any]


def main() -> int:
    from lora import settings

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--turns", type=int, help="of 20 steps of every side [8]")
    add("--rate", default=settings.RATE, help="of the link [%(default)s]")
    add("--sides", default="*", help="names or patterns, separated by semicolons [all]")
    add("--record", type=Path, default=RECORD, help="file of the runs")
    add("--report", action="store_true", help="report the newest recorded run at this rate")
    add("--choose", action="store_true", help="losses of the candidates, over a fast link")
    add("--smoke", action="store_true", help="every side for a few steps, without a record")
    arguments = parser.parse_args()
    if not arguments.report:
        if reason := _missing():
            print(f"bench_lora: {reason}.", file=sys.stderr)
            return 2
        if not BASE.exists():
            subprocess.run([sys.executable, SCRIPT, "pretrain"], check=True)
        given = settings.CANDIDATES if arguments.choose else settings.SIDES
        patterns = arguments.sides.split(";")
        sides = [side for side in given if any(fnmatch(side.name, each) for each in patterns)]
        turns = arguments.turns or settings.NUM_TURNS
        if arguments.smoke:
            run = measure(sides, turns=1, steps=SMOKE_STEPS, rate=FAST_RATE, half="first")
        elif arguments.choose:
            run = measure(sides, turns=turns, rate=FAST_RATE, half="first")
        else:
            run = measure(sides, turns=turns, rate=arguments.rate, half="second")
            arguments.record.parent.mkdir(parents=True, exist_ok=True)
            with arguments.record.open("a") as file:
                file.write(json.dumps(run) + "\n")
    else:
        runs = map(json.loads, arguments.record.read_text().splitlines())
        run = [each for each in runs if each["rate"] == arguments.rate][-1]
    others = max(turn["foreign_share"] for turn in run["turns"])
    print(f"{run['rate']}, {run['date']}, others used at most {others:.0%} of the processors")
    return report("lora_choice" if arguments.choose else "lora", bars_of(run))


def _missing() -> str:
    """What is not here of what a measurement needs; empty if all is."""
    from importlib.util import find_spec

    from tests.netlab import missing_requirement

    if reason := missing_requirement():
        return f"test hosts are not available: {reason}"
    if not os.environ.get("TORCHMN_TEST_DATA"):
        return "TORCHMN_TEST_DATA must be the folder of the data"
    absent = [name for name in ("transformers", "peft") if find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def measure(
    sides: Sequence[Side], *, turns: int, rate: str, half: str, steps: int | None = None
) -> Run:
    """Build all sides, let them take turns, and validate them."""
    from lora import settings
    from rank_processes import end_ranks, one_core_each, request, start_ranks
    from tests.netlab import netlab
    from time_to_loss.runs import VARIABLES

    steps = steps or settings.TURN_STEPS
    taken: list[dict[str, Any]] = []
    with netlab(2, FAST_RATE, cores=one_core_each(2)) as lab:
        job = start_ranks([SCRIPT, "worker"], lab, variables={**VARIABLES, "PYTHONHASHSEED": "0"})

        def ask(command: str, **words: object) -> list[dict[str, Any]]:
            return request(job, json.dumps({"command": command, **words}))

        for side in sides:
            numbers = ask("build", side=asdict(side), base=str(BASE))[0]
        lab.set_rate(rate)
        for turn in range(turns):
            start = turn % len(sides)
            for side in [*sides[start:], *sides[:start]]:
                before, clock, busy = lab.bytes_sent(lab.hosts[0]), time.monotonic(), _busy_s()
                ranks = ask("train", name=side.name, steps=steps, half=half)
                clock, busy = time.monotonic() - clock, _busy_s() - busy
                foreign_s = max(0.0, busy - sum(rank["busy_s"] for rank in ranks))
                taken.append(
                    {
                        "side": side.name,
                        "turn": turn,
                        "seconds": max(rank["seconds"] for rank in ranks),
                        "main_thread_s": statistics.mean(r["main_thread_s"] for r in ranks),
                        "megabytes": (lab.bytes_sent(lab.hosts[0]) - before) / steps / 1e6,
                        "foreign_share": foreign_s / (clock * (os.cpu_count() or 1)),
                    }
                )
            print(f"turn {turn + 1} of {turns}", flush=True)
        lab.set_rate(FAST_RATE)
        losses = {
            side.name: max(rank["loss"] for rank in ask("validate", name=side.name, half=half))
            for side in sides
        }
        end_ranks(job)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "versions": {name: version(name) for name in ("transformers", "peft")},
        "rate": rate,
        "steps": turns * steps,
        "parameters": {key: numbers[key] for key in ("trained", "all")},
        "sides": [asdict(side) for side in sides],
        "turns": taken,
        "losses": losses,
    }


def bars_of(run: Run) -> list[Bar]:
    """Milliseconds, bytes and losses of all sides, and how many times DDP's speed they have."""
    from lora.settings import BASELINE, NO_EXCHANGE

    names = [side["name"] for side in run["sides"]]
    seconds = {name: [t["seconds"] for t in run["turns"] if t["side"] == name] for name in names}
    numbers = run["parameters"]
    share = numbers["trained"] / numbers["all"]
    bars = [Bar(f"trained parameters ({share:.1%} of all)", numbers["trained"] / 1e6, "million")]
    for name in names:
        sent = [t["megabytes"] for t in run["turns"] if t["side"] == name]
        bars.append(median_bar(f"{name}: a step", [1e3 * each for each in seconds[name]], "ms"))
        bars.append(Bar(f"{name}: sent by a worker in a step", statistics.mean(sent), "MB"))
        bars.append(Bar(f"{name}: loss after {run['steps']} steps", run["losses"][name], ""))
    for name in names:
        if BASELINE in seconds and name != BASELINE:
            bars.append(ratio_bar(f"{name}: times DDP's speed", seconds[BASELINE], seconds[name]))
    for name in names:
        if NO_EXCHANGE in seconds and name != NO_EXCHANGE:
            alone = seconds[NO_EXCHANGE]
            bars.append(ratio_bar(f"{name}: speed / without exchange", alone, seconds[name]))
    return bars


def _busy_s() -> float:
    from exchange.measurement import busy_s

    return busy_s()


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        from lora.worker import serve

        serve()
    elif sys.argv[1:] == ["pretrain"]:
        from lora.worker import pretrain

        pretrain(BASE)
    else:
        raise SystemExit(main())
