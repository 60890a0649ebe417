"""``torchmn run``: run a script as several workers on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

CONTEXT = {"allow_interspersed_args": False}
"""What stands behind the script belongs to the script, options too."""


def run(
    target: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The script, or with -m a module.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments, as they are.")
    ] = None,
    num_ranks: Annotated[int, typer.Option("-n", help="Number of workers.")] = 1,
    backend: Annotated[
        str, typer.Option(help="auto, gloo, nccl or mpi: what carries the bytes.")
    ] = "auto",
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for rank0.log, rank0.exit.json, ...")
    ] = None,
    grace_s: Annotated[
        float,
        typer.Option("--grace", help="Seconds between asking a worker to end and killing it."),
    ] = 5.0,
    is_module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")
    ] = False,
) -> None:
    """Run SCRIPT as N workers on this machine.

    The output of worker 0 is shown with [0] in front and kept in a file, and so on. When a worker
    fails, the others are ended, and its exit code is the exit code of this command.
    """
    from torchmn.launch import Job, choose_backend, python_command, run_job, this_machine
    from torchmn.launch.job import default_log_dir

    argv = python_command(target, args or [], is_module=is_module)
    chosen, why = choose_backend(backend, this_machine(os.environ), num_ranks)
    job = Job(
        argv=tuple(argv),
        num_ranks=num_ranks,
        backend=chosen,
        log_dir=log_dir or default_log_dir(),
        grace_s=grace_s,
    )
    raise typer.Exit(run_job(job, os.environ, why="" if backend == chosen else why))
