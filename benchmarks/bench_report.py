"""Faults planted in trainings on test hosts: does `torchmn report` name fault and place?

    make bench-report ARGS="--seed 1"

Each kind of fault is planted once per pass in a training of its own (`report_training.py`, started
by `torchmn run`) on test hosts, with a strength and a place drawn at random; healthy trainings are
reported as often as asked for. A seed and the number of a trial repeat the trial. Each is appended
to `records/report.jsonl`. Needs Linux and root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planted_faults import bars_of_alarms, bars_of_faults, run_benchmark
from rank_processes import one_core_each
from record import Bar
from tests.netlab import Host, Lab, netlab
from tests.netlab.construction import port_of, shape

import torchmn

SCRIPT = Path(__file__).parent / "report_training.py"
SOURCES = str(Path(torchmn.__file__).parents[1])
LIMIT_S = 240.0
NUM_HOSTS = 2
HOG = "while True: pass"


@dataclass(frozen=True)
class Fault:
    """Something that is wrong on one host, which has one rank."""

    kind: str
    named_as: tuple[tuple[str, str | None], ...]
    """Kinds of findings, with their phase, that name it."""
    plant: Callable[[random.Random, int, Lab, ExitStack], list[str]]
    """Returns arguments of the training, for the rank at fault."""


FAULTS: list[Fault] = []


def fault(*named_as: tuple[str, str | None]) -> Callable[[Any], Any]:
    def register(plant: Any) -> Any:
        FAULTS.append(Fault(plant.__name__.replace("_", " "), named_as, plant))
        return plant

    return register


@fault(("late rank", "backward"), ("late host", "backward"))
def more_work_in_backward(
    chance: random.Random, rank: int, lab: Lab, stack: ExitStack
) -> list[str]:
    return ["--rank", str(rank), "--backward", str(chance.uniform(0.3, 1.0))]


@fault(("late rank", "forward"), ("late host", "forward"))
def more_work_in_forward(chance: random.Random, rank: int, lab: Lab, stack: ExitStack) -> list[str]:
    return ["--rank", str(rank), "--forward", str(chance.uniform(0.5, 1.5))]


@fault(("late rank", "data"), ("late host", "data"))
def slow_input(chance: random.Random, rank: int, lab: Lab, stack: ExitStack) -> list[str]:
    return ["--rank", str(rank), "--data", str(chance.uniform(0.3, 1.0))]


@fault(("late rank", None), ("late host", None))
def another_program_on_its_core(
    chance: random.Random, rank: int, lab: Lab, stack: ExitStack
) -> list[str]:
    stack.enter_context(_running(lab.hosts[rank], [sys.executable, "-c", HOG]))
    return []


@fault(("slow link", "exchange"))
def slow_exchange_on_one_host(
    chance: random.Random, rank: int, lab: Lab, stack: ExitStack
) -> list[str]:
    rate = f"{chance.uniform(80, 400):.0f}mbit"
    shape(lab._switch, [port_of(lab.hosts[rank].index)], rate)  # what is sent to the host
    return []


@contextmanager
def _running(host: Host, words: list[str]) -> Iterator[None]:
    null = subprocess.DEVNULL
    process = host.popen(words, env=dict(os.environ), stdout=null, stderr=null)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def trials(options: argparse.Namespace) -> list[tuple[int, Fault | None]]:
    faults = [each for each in FAULTS if options.only in each.kind] * options.passes
    return list(enumerate([*faults, *[None] * options.healthy]))


def trial(seed: int, number: int, planted: Fault | None) -> dict[str, Any]:
    """Train on test hosts with a fault, or without, and read the report."""
    chance = random.Random(f"{seed}:{number}")
    rank = chance.randrange(NUM_HOSTS)
    with ExitStack() as stack:
        lab = stack.enter_context(netlab(NUM_HOSTS, None, cores=one_core_each(NUM_HOSTS)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="report-")))
        options = planted.plant(chance, rank, lab, stack) if planted else []
        findings = _train(lab, folder, options)
    faults = [each for each in findings if each["is_fault"]]
    return {
        "number": number,
        "kind": planted.kind if planted else "healthy",
        "rank": rank if planted else None,
        "is_right": _is_named(planted, rank, faults) if planted else not faults,
        "faults": [f"{each['what']}: {each['evidence']}" for each in faults],
        "shares": [each["share"] for each in faults],
    }


def _is_named(planted: Fault, rank: int, faults: list[dict[str, Any]]) -> bool:
    """Whether the most expensive fault is this one, at this place."""
    first = faults[0] if faults else None
    if first is None:
        return False
    is_kind = any(
        first["kind"] == kind and phase in (None, first["phase"])
        for kind, phase in planted.named_as
    )
    if first["kind"] == "slow link":
        return is_kind and list(first["hosts"]) == [f"n{rank}"]
    return is_kind and list(first["ranks"]) == [rank]


def _train(lab: Lab, folder: Path, options: list[str]) -> list[dict[str, Any]]:
    """The findings about a training of one rank on each host."""
    env = {
        **os.environ,
        "PYTHONPATH": SOURCES,
        "TORCHMN_RSH": str(lab.rsh_agent),
        "OMP_NUM_THREADS": "1",
    }
    hosts = ",".join(f"{host.name}:1" for host in lab.hosts)
    for words in (
        ["run", "--backend", "gloo", "--hosts", hosts, "--log-dir", "logs", str(SCRIPT), *options],
        ["report", "--json", "logs"],
    ):
        done = lab.hosts[0].run(
            [sys.executable, "-m", "torchmn", *words],
            env=env,
            cwd=folder,
            check=False,
            timeout_s=LIMIT_S,
        )
        if done.returncode:
            raise RuntimeError(f"torchmn {words[0]} failed: {done.stderr[-2000:]}")
    (run,) = json.loads(done.stdout)["runs"]
    found: list[dict[str, Any]] = run["findings"]
    return found


def bars(records: list[dict[str, Any]]) -> list[Bar]:
    """Over all recorded trials."""
    return bars_of_faults(records) + bars_of_alarms(records)


if __name__ == "__main__":
    raise SystemExit(
        run_benchmark(
            "report",
            about=__doc__,
            passes=4,
            trials=trials,
            trial=trial,
            shown=lambda found: str(found["faults"]),
            bars=bars,
        )
    )
