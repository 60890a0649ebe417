"""``torchmn plan``: predict the step of a training on other hosts, links, codecs and schedules."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchmn.base.errors import TorchmnError, UsageError
from torchmn.base.names import CODEC_TRAITS, ROUTE_TRAITS, SCHEDULE_TRAITS
from torchmn.cli.options import values_of

_PREDICTED = [name for name, traits in SCHEDULE_TRAITS.items() if traits.model]

if TYPE_CHECKING:
    from torchmn.observe.plan.facts import PredictedStep, Training


def plan(
    path: Annotated[
        Path,
        typer.Argument(metavar="RUN|TABLE", help="Folder of a recorded run, or a .toml table."),
    ],
    hosts: Annotated[
        str | None, typer.Option(help="Numbers of hosts, such as 1,2,4 [default: to 32].")
    ] = None,
    ranks_per_host: Annotated[str | None, typer.Option(help="Numbers of ranks per host.")] = None,
    links: Annotated[
        str | None, typer.Option(help="Rates of the adapters, such as 10gbit,1gbit.")
    ] = None,
    codecs: Annotated[str | None, typer.Option(help=f"Codecs: {', '.join(CODEC_TRAITS)}.")] = None,
    schedules: Annotated[
        str | None, typer.Option(help=f"Schedules: {', '.join(_PREDICTED)}.")
    ] = None,
    route: Annotated[
        str | None,
        typer.Option(
            help=f"The route of sums: {', '.join(ROUTE_TRAITS)}.",
            autocompletion=values_of([*ROUTE_TRAITS]),
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict steps and efficiency from a recorded run, or from the table of a training.

    Options with several values are combined with each other. What is not given stays as it was
    recorded. Settings that cannot be predicted are refused with the reason.
    """
    import msgspec

    from torchmn.cluster.network import rate_bytes_per_s
    from torchmn.observe.plan.facts import predict, read_table
    from torchmn.observe.plan.run_facts import facts_of

    for rate in _texts(links):
        rate_bytes_per_s(rate)
    known = read_table(path) if path.suffix == ".toml" else facts_of(path)
    grid: dict[str, list[str] | list[int]] = {
        "route": _texts(route),
        "rate": _texts(links),
        "schedule": _texts(schedules),
        "codec": _texts(codecs),
        "ranks_per_host": _numbers("--ranks-per-host", ranks_per_host),
        "hosts": _numbers("--hosts", hosts) or _default_hosts(known),
    }
    given = {name: values for name, values in grid.items() if values}
    predictions: list[tuple[Training, PredictedStep]] = []
    refused: dict[str, None] = {}
    for values in itertools.product(*given.values()):
        training = msgspec.structs.replace(known, **dict(zip(given, values, strict=True)))
        try:
            predictions.append((training, predict(training)))
        except TorchmnError as error:
            refused[str(error)] = None
    if not predictions:
        raise UsageError(" ".join(refused))
    notes = dict.fromkeys(note for training, _ in predictions for note in _notes(known, training))
    if as_json:
        rows = [_row(training, step) for training, step in predictions]
        typer.echo(
            json.dumps({"predictions": rows, "notes": list(notes), "not_predicted": list(refused)})
        )
        return
    _print_tables(known.title, predictions)
    for note in notes:
        typer.echo(f"Note: {note}.")
    for reason in refused:
        typer.echo(f"Not predicted: {reason}")


def _row(training: Training, step: PredictedStep) -> dict[str, Any]:
    names = ("hosts", "ranks_per_host", "rate", "route", "schedule", "codec", "samples")
    efficiency = training.compute_s / step.seconds
    return {
        **{name: getattr(training, name) for name in names},
        "step_s": step.seconds,
        "compute_s": step.compute_s,
        "coding_s": step.coding_s,
        "exposed_s": step.exposed_s,
        "straggler_s": step.straggler_s,
        "samples_per_s": training.num_ranks * training.samples / step.seconds,
        "speed_up": training.num_ranks * efficiency,
        "efficiency": efficiency,
    }


_SETTINGS = ("hosts", "ranks", "link", "schedule", "codec", "batch")
_STEP = ("step, ms", "samples/s", "speed-up", "efficiency")
_PARTS = ("compute", "coding", "exchange", "slowest rank")


def _cells(training: Training, step: PredictedStep) -> dict[str, str]:
    row = _row(training, step)
    return {
        "hosts": str(training.hosts),
        "ranks": str(training.num_ranks),
        "link": "-" if training.hosts == 1 else str(training.rate),
        "schedule": training.schedule,
        "codec": training.codec,
        "batch": str(training.samples),
        "step, ms": f"{step.seconds * 1e3:.1f}",
        "samples/s": f"{row['samples_per_s']:.4g}",
        "speed-up": f"{row['speed_up']:.2f}",
        "efficiency": f"{row['efficiency']:.1%}",
        "compute": f"{step.compute_s * 1e3:.1f}",
        "coding": f"{step.coding_s * 1e3:.1f}",
        "exchange": f"{step.exposed_s * 1e3:.1f}",
        "slowest rank": f"{step.straggler_s * 1e3:.1f}",
    }


def _print_tables(title: str, predictions: list[tuple[Training, PredictedStep]]) -> None:
    """Print the steps and their parts; values common to all go above the table."""
    from rich.console import Console
    from rich.table import Table

    rows = [_cells(training, step) for training, step in predictions]
    differing = [n for n in _SETTINGS if n == "ranks" or len({row[n] for row in rows}) > 1]
    same = [f"{name} {rows[0][name]}" for name in _SETTINGS if name not in differing]
    console = Console(highlight=False, markup=False)
    console.print(title, style="bold")
    console.print("all with " + ", ".join(same))
    for heading, names in (("the step", _STEP), ("its parts, in milliseconds", _PARTS)):
        table = Table(title=heading, title_justify="left", box=None, pad_edge=False)
        columns = [*differing, *names]
        for name in columns:
            table.add_column(name, justify="left" if name in ("schedule", "codec") else "right")
        for row in rows:
            table.add_row(*(row[name] for name in columns))
        console.print(table)


def _notes(known: Training, training: Training) -> Iterator[str]:
    """Describe what the predictions do not include."""
    if training.codec not in ("float32", *known.codecs):
        yield f"the codec {training.codec} was timed on this machine"
    if training.num_ranks == 1:
        return
    if not training.deviations:
        yield "no distribution of step times is known: waits for the slowest rank are not included"
    elif training.num_ranks > len(training.deviations):
        yield (
            f"the slowest of {training.num_ranks} ranks is estimated from "
            f"{len(training.deviations)} recorded steps: rarer delays are not included"
        )
    if training.send_s_per_byte is None and training.hosts > 1:
        yield "what sending takes from the cores was not measured and counts as free"
    if training.ranks_per_host > 1 and training.node_bytes_per_s is None:
        yield "sums within a host were not measured and count as free"
    if not training.gradients:
        yield "gradients are taken to become ready evenly during backward"


def _texts(text: str | None) -> list[str]:
    return [] if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str | None) -> list[int]:
    try:
        numbers = [int(word) for word in _texts(text)]
    except ValueError:
        raise UsageError(f"{option} {text!r} must be whole numbers, separated by commas.") from None
    for number in numbers:
        if number < 1:
            raise UsageError(f"{option} must be at least 1, got {number}.")
    return numbers


def _default_hosts(known: Training) -> list[int]:
    """Return the numbers of hosts that are predicted by default."""
    # Without a link, two are enough to show that several hosts cannot be predicted.
    most = (1, 2) if known.rate is None else (1, 2, 4, 8, 16, 32)
    return sorted({known.hosts, *most})
