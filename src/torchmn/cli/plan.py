"""``torchmn plan``: predict the step of a training on other hosts, links, codecs and schedules."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchmn.cli.options import values_of
from torchmn.errors import TorchmnError, UsageError

if TYPE_CHECKING:
    from torchmn.planning.description import Description

# What a shell completes. The registries import torch, for which it would wait seconds.
CODEC_NAMES = ("float32", "float16", "bfloat16", "int8", "int4", "int2", "1bit", "power_sgd")
SCHEDULE_NAMES = (
    "every_step",
    "double_buffering",
    "periodic_average",
    "block_momentum",
    "diloco",
    "parameter_server",
)
ROUTE_NAMES = (
    "naive",
    "flat",
    "hierarchical",
    "two_dimensional",
    "single_node",
    "non_cuda_aware",
    "pure_nccl",
)


def plan(
    source: Annotated[
        list[Path],
        typer.Argument(metavar="RUN|FILE...", help="Folders of recorded runs, or one description."),
    ],
    hosts: Annotated[
        str | None, typer.Option(help="Numbers of hosts, such as 1,2,4 [default: to 32].")
    ] = None,
    ranks_per_host: Annotated[str | None, typer.Option(help="Numbers of ranks per host.")] = None,
    links: Annotated[
        str | None, typer.Option(help="Rates of the adapters, such as 10gbit,1gbit.")
    ] = None,
    codecs: Annotated[
        str | None,
        typer.Option(help="Codecs, such as float32,int8.", autocompletion=values_of(CODEC_NAMES)),
    ] = None,
    schedules: Annotated[
        str | None,
        typer.Option(
            help="Schedules, such as every_step,block_momentum.",
            autocompletion=values_of(SCHEDULE_NAMES),
        ),
    ] = None,
    batches: Annotated[
        str | None, typer.Option(help="Samples of one rank in one step, such as 32,64.")
    ] = None,
    block_steps: Annotated[
        int | None, typer.Option(help="Steps of a block, for local-update schedules.")
    ] = None,
    overlap_steps: Annotated[
        int | None, typer.Option(help="Steps during which its exchange is pending.")
    ] = None,
    route: Annotated[
        str | None,
        typer.Option(help="The route of sums.", autocompletion=values_of(ROUTE_NAMES)),
    ] = None,
    cores_per_rank: Annotated[
        float | None, typer.Option(help="Cores of a rank; below 1 if ranks share a core.")
    ] = None,
    times_codecs: Annotated[
        bool, typer.Option("--time-codecs", help="Time all codecs on this machine first.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the efficiency into this file (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Predict steps and efficiency from short recorded runs, or from a description.

    Options with several values are combined with each other. What is not given stays as it was
    recorded. Settings for which there is no data are refused with the reason.
    """
    import msgspec
    from rich.console import Console

    from torchmn.planning.description import rate_bytes_per_s, schedule_of
    from torchmn.planning.prediction import predict_setting
    from torchmn.planning.show import as_json as to_json
    from torchmn.planning.show import changes_table, draw, tables_of
    from torchmn.planning.sources import known_of
    from torchmn.planning.what_pays import what_pays

    for rate in _texts(links):
        rate_bytes_per_s(rate)
    for schedule in _texts(schedules):
        schedule_of(schedule)
    for option, number in (("--block-steps", block_steps), ("--overlap-steps", overlap_steps)):
        least = 1 if option == "--block-steps" else 0
        if number is not None and number < least:
            raise UsageError(f"{option} must be at least {least}, got {number}.")
    if cores_per_rank is not None and not cores_per_rank > 0:
        raise UsageError(f"--cores-per-rank must be above 0, got {cores_per_rank:g}.")
    known = known_of(source, times_codecs=times_codecs)
    base = known.setting
    fixed = {
        "block_steps": block_steps,
        "overlap_steps": overlap_steps,
        "route": route,
        "cores_per_rank": cores_per_rank,
    }
    base = msgspec.structs.replace(
        base, **{name: value for name, value in fixed.items() if value is not None}
    )
    if overlap_steps is not None and overlap_steps >= base.block_steps:
        raise UsageError(
            f"--overlap-steps {overlap_steps} must be less than the {base.block_steps} steps of a "
            "block: choose fewer, or raise --block-steps."
        )
    grid: dict[str, list[str] | list[int]] = {
        "rate": _texts(links),
        "schedule": _texts(schedules),
        "codec": _texts(codecs),
        "samples": _numbers("--batches", batches),
        "ranks_per_host": _numbers("--ranks-per-host", ranks_per_host),
        "hosts": _numbers("--hosts", hosts) or _default_hosts(known),
    }
    given: dict[str, list[str] | list[int]] = {n: values for n, values in grid.items() if values}
    predictions, refused = [], []
    for values in itertools.product(*given.values()):
        setting = msgspec.structs.replace(base, **dict(zip(given, values, strict=True)))
        try:
            predictions.append(predict_setting(known, setting))
        except TorchmnError as error:
            refused.append(str(error))
    refused = list(dict.fromkeys(refused))
    if not predictions:
        raise UsageError(" ".join(refused))
    changes, not_known = what_pays(known, base)
    if picture is not None:
        draw(known, predictions, picture)
    if as_json:
        typer.echo(json.dumps(to_json(known, predictions, changes, [*refused, *not_known])))
        return
    console = Console()
    console.print(*tables_of(known, predictions), sep="\n")
    console.print(changes_table(changes))
    for note in dict.fromkeys(note for each in predictions for note in each.notes):
        console.print(f"Note: {note}.", style="dim", highlight=False, markup=False)
    for reason in dict.fromkeys([*refused, *not_known]):
        console.print(f"Not predicted: {reason}", style="yellow", highlight=False, markup=False)


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


def _default_hosts(known: Description) -> list[int]:
    """Without a link two are enough to show that several hosts cannot be predicted."""
    most = (1, 2) if known.link is None else (1, 2, 4, 8, 16, 32)
    return sorted({known.setting.hosts, *most})
