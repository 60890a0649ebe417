"""``torchmn inspect``: what the ranks of a running job do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def inspect(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="Log folder of the job (default: the newest of your jobs on this host that log "
            "below the current folder, else the only one).",
        ),
    ] = None,
    is_full: Annotated[
        bool, typer.Option("--full", help="Show the stacks of all threads, and all their frames.")
    ] = False,
    is_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what every rank of a running job does: stacks, last collectives, memory and queue.

    The job goes on as before. Run this on the host where the job was started, as the same user.
    """
    import msgspec

    from torchmn.control.hang_report import report_of_inspection
    from torchmn.run.monitor.inspections import inspect as ask

    found = ask(run)
    if is_json:
        typer.echo(json.dumps({"format": 1, **msgspec.to_builtins(found)}, indent=1))
    else:
        typer.echo(report_of_inspection(found, is_full=is_full))
