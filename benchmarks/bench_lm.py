"""Time to a fixed validation loss of a small GPT over 100 Mb/s: DDP, torchft's DiLoCo and torchmn.

    bench_lm.py --choose       # on another text: the goals, and all candidates that are missing
    bench_lm.py --choose --again --sides ...      # candidates once more: the newest run counts
    bench_lm.py [--seeds N] [--sides PATTERN;...] [--record FILE]
    bench_lm.py --report [--choose]               # the recorded runs, without measuring
    bench_lm.py --smoke                           # every side for a few steps; keeps no record

Two test hosts (needs root, and TORCHMN_TEST_DATA for the texts), a core and a thread each, fresh
processes for every run. Model, start, order of sequences, batch, AdamW, warm-up and validation are
the same for all sides (`time_to_loss/worker.py`); they differ in the exchange, and in the learning
rate and the blocks that suit it, all chosen in the same way (`time_to_loss/choice.py`). The goal is
the loss that DDP has after a fixed number of steps with a seed that is not compared.

The clock starts when both ranks are ready for the first step. It stands still during a validation:
it stops when both ranks have made the step and none of their bytes are under way, and continues
when both have validated. torchft's bytes cannot be waited for from outside, so that its streaming
is not charged for what is under way then. Each rank validates the parameters that it has, the
larger loss counts, and a run ends at the first validation at or below the goal.

A ratio is of the seconds of two sides with the same seed on the same day. All recorded runs with
the current settings count, so that repeating a run until it is fast does not help; but none in
which other programs used more than a tenth of the processors, which slow down computation and not
the link.
"""

from __future__ import annotations

import argparse
import os
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from record import RECORDS, report

if TYPE_CHECKING:
    from time_to_loss.settings import Side, Text

RECORD = RECORDS / "lm.jsonl"
CHOICE = RECORDS / "lm_choice.jsonl"
SMOKE_STEPS = 20


def main() -> int:
    arguments = _parse()
    from tests.netlab import missing_requirement
    from time_to_loss.bars import bars_of, choice_bars
    from time_to_loss.runs import load

    if not arguments.report and (reason := missing_requirement()):
        print(f"Test hosts are not available: {reason}.", file=sys.stderr)
        return 2
    if not arguments.report and not os.environ.get("TORCHMN_TEST_DATA"):
        print("bench_lm: TORCHMN_TEST_DATA must be the folder of the data.", file=sys.stderr)
        return 2
    if arguments.smoke:
        return _smoke(arguments.sides)
    if not arguments.report:
        _choose(arguments) if arguments.choose else _compare(arguments)
    choice_runs = load(arguments.choice_record)
    if arguments.choose:
        return report("lm_choice", choice_bars(choice_runs))
    return report("lm", bars_of(load(arguments.record), choice_runs))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--seeds", type=int, default=5, help="repetitions, each with its own seed [%(default)s]")
    add("--sides", default="*", help="names or patterns, separated by semicolons [all]")
    add("--record", type=Path, default=RECORD, help="file of the compared runs")
    add("--choice-record", type=Path, default=CHOICE, help="file of the candidates' runs")
    add("--choose", action="store_true", help="run the candidates that are missing instead")
    add("--again", action="store_true", help="with --choose: also those that were run before")
    add("--report", action="store_true", help="report the recorded runs without measuring")
    add("--smoke", action="store_true", help="every side for a few steps, without a record")
    return parser.parse_args()


def _is_wanted(name: str, patterns: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns.split(";"))


def _choose(arguments: argparse.Namespace) -> None:
    """Run what `choice.py` needs and the record lacks."""
    from time_to_loss import choice
    from time_to_loss.runs import load
    from time_to_loss.settings import CANDIDATES, COMPARED, DDP, TUNED

    path = arguments.choice_record
    for side in DDP:
        if choice.loss_of_ddp(load(path), side, TUNED) is None:
            _set_goal(path, side, TUNED)
    side = choice.chosen_ddp(load(path))
    goal = choice.goal_of(load(path), TUNED)
    if side is None or goal is None:
        return
    if choice.goal_of(load(path), COMPARED) is None:
        _set_goal(path, side, COMPARED)
    for side in CANDIDATES:
        is_due = arguments.again or choice.seconds_of(load(path), side) is None
        if is_due and _is_wanted(side.name, arguments.sides):
            for seed in TUNED.seeds:
                _run(path, side, TUNED, seed, goal)


def _compare(arguments: argparse.Namespace) -> None:
    """All chosen sides with each seed, in another order each time."""
    from time_to_loss import choice
    from time_to_loss.runs import load
    from time_to_loss.settings import COMPARED

    choice_runs = load(arguments.choice_record)
    goal = choice.goal_of(choice_runs, COMPARED)
    chosen = choice.chosen(choice_runs).values()
    sides = [side for side in chosen if _is_wanted(side.name, arguments.sides)]
    if goal is None or not sides:
        print("No settings were chosen yet: run bench_lm.py --choose.", file=sys.stderr)
        return
    for turn, seed in enumerate(COMPARED.seeds[: arguments.seeds]):
        start = turn % len(sides)
        for side in sides[start:] + sides[:start]:
            _run(arguments.record, side, COMPARED, seed, goal)


def _run(path: Path, side: Side, text: Text, seed: int, goal: float) -> None:
    from time_to_loss.runs import append, describe, run
    from time_to_loss.settings import MAX_STEPS, RATE

    made = run(side, text, seed, RATE, MAX_STEPS, goal)
    print(describe(made), flush=True)
    append(path, made)


def _set_goal(path: Path, side: Side, text: Text) -> None:
    """The loss of DDP does not depend on the link, which is therefore fast."""
    from time_to_loss.runs import append, describe, run
    from time_to_loss.settings import FAST_RATE, NUM_STEPS

    made = run(side, text, text.goal_seed, FAST_RATE, NUM_STEPS, 0.0)
    print(f"{text.name}: {describe(made)}", flush=True)
    append(path, made)


def _smoke(patterns: str) -> int:
    """The first candidate of each family."""
    from time_to_loss.runs import describe, run
    from time_to_loss.settings import CANDIDATES, DDP, RATE, TUNED, ddp

    sides = {side.family: side for side in reversed((*DDP, ddp(1e-3, "fp16"), *CANDIDATES))}
    failed = False
    for side in sides.values():
        if _is_wanted(side.name, patterns):
            made = run(side, TUNED, TUNED.seeds[0], RATE, SMOKE_STEPS, 0.0)
            print(describe(made), flush=True)
            failed |= "failed" in made
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        from time_to_loss.worker import serve

        serve()
    else:
        raise SystemExit(main())
