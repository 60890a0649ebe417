"""``torchmn doctor``: examine hosts and links, before a job or after a failed one."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer


def doctor(
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    hosts: Annotated[
        str | None, typer.Option(help="Hosts and slots, such as a:4,b:2.", metavar="HOSTS")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="File with a line NAME slots=N for each host.")
    ] = None,
    is_full: Annotated[
        bool, typer.Option("--full", help="Every pair of hosts, and longer measurements.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything that was found as JSON.")
    ] = False,
    paths: Annotated[
        list[str] | None,
        typer.Option(
            "--path", help="Folder for data or checkpoints (repeatable; default: this one)."
        ),
    ] = None,
    expected: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="RATE",
            help="Rate that links should have, such as 10gbit (default: that of the adapters).",
        ),
    ] = None,
) -> None:
    """Examine hosts and the links between them: names, versions, limits, clocks, rates.

    The hosts are those of --hosts or --hostfile, else those of the job of PBS, Slurm or Grid Engine
    that this runs in, else this host alone. Exits with 0 if all is healthy, 3 after warnings and 4
    if a job would fail or be very slow.
    """
    from torchmn.base.errors import UsageError
    from torchmn.cluster.allocation import allocation
    from torchmn.cluster.network import is_this_host, rate_bytes_per_s
    from torchmn.doctor.examination import examine
    from torchmn.doctor.findings import Request
    from torchmn.doctor.report import as_json as json_of
    from torchmn.doctor.report import as_text, exit_status
    from torchmn.run.plan import RunOptions, assign_slots

    if words:
        raise UsageError(f"Unexpected {words[0]!r}: hosts are named with --hosts a,b.")
    given = None if hosts or hostfile else allocation(os.environ)
    chosen = assign_slots(RunOptions(argv=("doctor",), hosts=hosts, hostfile=hostfile), given)
    slots = {each.name: each.slots for each in chosen}
    if len(slots) == 1 and is_this_host(next(iter(slots))):
        slots = {socket.gethostname(): sum(slots.values())}
    request = Request(
        slots=slots,
        cwd=str(Path.cwd()),
        paths=[str(Path(path).absolute()) for path in paths or ()],
        is_full=is_full,
        expected_bytes_per_s=rate_bytes_per_s(expected) if expected else 0.0,
    )
    found = examine(request, os.environ, shows_progress=sys.stderr.isatty())
    typer.echo(json_of(found) if as_json else as_text(found))
    raise typer.Exit(exit_status(found))
