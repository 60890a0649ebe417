"""Runs one side on two test hosts and keeps what came of it, one line of JSON each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exchange.measurement import busy_s
from rank_processes import one_core_each, start_ranks
from record import commit
from tests.netlab import netlab

from time_to_loss.settings import FAST_RATE, Side, Text

SCRIPT = Path(__file__).parents[1] / "bench_lm.py"
VARIABLES = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "NUMBA_NUM_THREADS": "1",
    "RUST_LOG": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""For all sides. The first two keep the heap; see benchmarks/README.md, `plain`."""

QUIET_SHARE = 0.1
"""Of the processors, used by other programs: a run in which they used more does not count."""

Run = dict[str, Any]


def run(side: Side, text: Text, seed: int, rate: str, max_steps: int, goal: float) -> Run:
    """Train one side in fresh processes. ``seconds`` and ``steps`` are None: goal not reached."""
    order = {
        "side": asdict(side),
        "text": text.name,
        "seed": seed,
        "goal": goal,
        "max_steps": max_steps,
    }
    with netlab(2, rate, cores=one_core_each(2)) as lab:
        job = start_ranks([str(SCRIPT), "worker"], lab, variables=VARIABLES)
        before, clock, busy = lab.bytes_sent(lab.hosts[0]), time.monotonic(), busy_s()
        for process in job:
            print(json.dumps(order), file=process.stdin, flush=True)
        replies = [process.stdout.readline() for process in job if process.stdout]
        nbytes = lab.bytes_sent(lab.hosts[0]) - before
        clock, busy = time.monotonic() - clock, busy_s() - busy
    ranks = [json.loads(line) if line else {"failed": "a rank has died"} for line in replies]
    reply = next((rank for rank in ranks if "failed" in rank), ranks[0])
    foreign_s = max(0.0, busy - sum(rank.pop("busy_s", 0.0) for rank in ranks))
    curve = reply.get("curve", [])
    reached = bool(curve) and curve[-1][2] <= goal
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "text": text.name,
        "seed": seed,
        "goal": goal,
        "rate": rate,
        "foreign_share": foreign_s / (clock * (os.cpu_count() or 1)),
        **side.settings(),
        "steps": curve[-1][0] if reached else None,
        "seconds": curve[-1][1] if reached else None,
        "megabytes": nbytes / 1e6,
        **reply,
    }


def append(path: Path, run: Run) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(run) + "\n")


def load(path: Path) -> list[Run]:
    """All runs, the oldest first; none without a file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_side(
    runs: Sequence[Run], side: Side, text: Text, rate: str, goal: float
) -> Mapping[int, list[Run]]:
    """The undisturbed runs of a side with its current settings, by seed, the oldest first.

    Over a fast link only losses matter, which other programs do not change.
    """
    wanted = json.loads(json.dumps(side.settings()))
    wanted.update(text=text.name, rate=rate, goal=goal)
    found: dict[int, list[Run]] = {}
    for run_ in runs:
        if "failed" in run_ or any(run_.get(key) != value for key, value in wanted.items()):
            continue
        if run_["foreign_share"] <= QUIET_SHARE or rate == FAST_RATE:
            found.setdefault(run_["seed"], []).append(run_)
    return found


def describe(run: Run) -> str:
    """One line for a person."""
    if "failed" in run:
        return f"{run['name']}, seed {run['seed']}: {run['failed']}"
    steps, seconds, loss = run["curve"][-1]
    outcome = f"reached {run['goal']}" if run["steps"] else f"did not reach {run['goal']}"
    if not run["goal"]:
        outcome = "trained"
    return (
        f"{run['name']}, seed {run['seed']}: {outcome} (loss {loss:.4f}) at step "
        f"{steps} in {seconds:.1f} s; a step: {1e3 * seconds / steps:.0f} ms, processor "
        f"{1e3 * run['processor_seconds'] / steps:.0f} ms, "
        f"{run['megabytes'] / steps:.2f} MB; others {run['foreign_share']:.0%}"
    )
