"""The two experiments and their records, and how their runs are carried out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from accuracy.runs import Key
from accuracy.tasks import Images
from record import RECORDS, commit

from large_batch import choice
from large_batch.runs import LargeRun, append, load, settings_of
from large_batch.sides import SIDES, TWO_WORKERS, Side
from large_batch.tasks import TASKS, Task
from large_batch.tasks import load as load_images


@dataclass(frozen=True)
class Experiment:
    """The runs that belong to it, by key, and the file in which they are kept."""

    path: Path
    wanted: dict[Key, tuple[Task, Side]]

    def runs(self) -> dict[Key, LargeRun]:
        """The recorded runs with the current settings."""
        return load(self.path, self.wanted.values())


def table() -> Experiment:
    """All sides of both tasks, seed by seed, so that a part of them is of use."""
    wanted: dict[Key, tuple[Task, Side]] = {}
    for task in TASKS.values():
        for seed in task.seeds:
            for side in SIDES.values():
                if seed in _seeds(task, side):
                    wanted[task.name, side.name, seed] = task, side
    return Experiment(RECORDS / "large_batch_runs.jsonl", wanted)


def _seeds(task: Task, side: Side) -> Sequence[int]:
    return task.seeds[:1] if side is TWO_WORKERS else task.seeds_of(side.factor)


def choices() -> Experiment:
    """All candidates of `choice.py`."""
    wanted: dict[Key, tuple[Task, Side]] = {}
    for each in choice.choices():
        for side in each.candidates.values():
            for seed in each.task.seeds:
                wanted[each.task.name, side.name, seed] = each.task, side
    return Experiment(RECORDS / "large_batch_choice.jsonl", wanted)


def carry_out(experiment: Experiment, keys: Sequence[Key], folder: str, num_jobs: int) -> None:
    """Execute runs, ``num_jobs`` at a time with one core each, and append them to the record."""
    alone = [key for key in keys if experiment.wanted[key][1] is not TWO_WORKERS]
    with ProcessPoolExecutor(num_jobs, get_context("spawn")) as pool:
        running = [pool.submit(execute, *experiment.wanted[key], key[2], folder) for key in alone]
        for future in as_completed(running):
            _keep(experiment.path, future.result())
    for key in keys:
        if key not in alone:
            _keep(experiment.path, _on_two_workers(key, folder))


def _keep(path: Path, run: LargeRun) -> None:
    append(path, run)
    print(run, flush=True)


def execute(task: Task, side: Side, seed: int, folder: str) -> LargeRun:
    """One run in this process, or in all ranks of a job. *Collective.*"""
    import torch

    from large_batch.training import train

    torch.set_num_threads(1)
    images = _images(task.name, task.held_out, folder)
    started = time.perf_counter()
    outcome = train(task, side, seed, images)
    return LargeRun(
        task=task.name,
        side=side.name,
        seed=seed,
        settings=settings_of(task, side),
        seconds=round(time.perf_counter() - started, 2),
        commit=commit(),
        **outcome,
    )


@cache
def _images(name: str, held_out: int, folder: str) -> Images:
    task = choice.CHOICE_TASKS[name.partition(",")[0]] if held_out else TASKS[name]
    return load_images(task, folder)


def _on_two_workers(key: Key, folder: str) -> LargeRun:
    """By `torchmn run`, which starts `work` in two processes."""
    entry = Path(__file__).parents[1] / "bench_recipes.py"
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run.jsonl"
        command = [sys.executable, "-m", "torchmn", "run", "-n", "2", "--backend", "gloo"]
        command += [str(entry), "worker", json.dumps(key), str(out), folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment)
        return LargeRun(**json.loads(out.read_text()))


def work(key: str, out: str, folder: str) -> None:
    """A worker of a run on two workers. *Collective.*"""
    import torchmn

    name, side, seed = json.loads(key)
    run = execute(TASKS[name], SIDES[side], seed, folder)
    if torchmn.create_communicator("naive").rank == 0:
        append(Path(out), run)
