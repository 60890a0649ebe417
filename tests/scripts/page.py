"""Writes docs/reference/works-with.md: `python -m tests.scripts.page`."""

from pathlib import Path

from .registry import SCHEDULES, WORLD_SIZES, Refused, Script
from .suite import chapters

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "works-with.md"
_INTRODUCTION = """\
# Works with: ordinary training scripts

Each item is a short training script in plain PyTorch. The tests run it in one process on whole
batches without torchmn, and on 1 and 2 ranks with torchmn, each rank with its part of every batch.
Parameters, buffers and everything that the script logs are compared, in float64 to 1e-12 of 1 plus
the value, under each of the schedules `every_step` and `auto`. The result is the same under both
unless the item names them. The scripts are in `tests/scripts/`; `python -m tests.scripts.page`
writes this page.

The numbers are those of one process, on every rank, unless the item ends with

- **refused**: an error on every rank that names the cure. One rank alone accepts the script and
  gives the numbers of one process, unless the item says otherwise.

`auto` is `schedule="auto"` without further permissions; in these tests it tries every plan that it
may choose within the few steps of a script.
"""


def text() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for title, scripts in chapters().items():
        parts.append("\n".join([f"## {title}", "", *map(_item, scripts)]) + "\n")
    return "\n".join(parts)


def _item(script: Script) -> str:
    """The script, and its result if that is not the same under all schedules."""
    notes = [script.title]
    if script.own_definition:
        notes.append(f"own definition: {script.own_definition}")
    if script.why_tolerance:
        notes.append(f"to {script.tolerance:.0e}: {script.why_tolerance}")
    results: dict[str, list[str]] = {}
    for schedule in SCHEDULES:
        results.setdefault(_result(script, schedule), []).append(f"`{schedule}`")
    if len(results) == 1:
        (text,) = results
    else:
        text = "; ".join(f"{', '.join(names)}: {result}" for result, names in results.items())
    return f"- {'; '.join(notes)}" + ("" if text == "same" else f" → {text}")


def _result(script: Script, schedule: str) -> str:
    outcome = script.outcome(schedule, WORLD_SIZES[-1])
    if not isinstance(outcome, Refused):
        return "same"
    alone = " (on one rank too)" if outcome.on_one_rank else ""
    return f"refused{alone}: {outcome.cure}"


if __name__ == "__main__":
    PAGE.write_text(text())
