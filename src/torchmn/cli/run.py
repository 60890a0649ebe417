"""``torchmn run``: run a script as several workers, here or on many hosts."""

from __future__ import annotations

import os
import shlex
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
    num_ranks: Annotated[
        int | None,
        typer.Option("-n", help="Number of workers: all slots of the hosts, or 1 without hosts."),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="File with a line NAME slots=N for each host.")
    ] = None,
    hosts: Annotated[str | None, typer.Option(help="Hosts and slots, such as a:4,b:2.")] = None,
    num_nodes: Annotated[int | None, typer.Option("--nodes", help="Number of hosts.")] = None,
    per_node: Annotated[int | None, typer.Option(help="Number of workers on each host.")] = None,
    launcher: Annotated[
        str, typer.Option(help="auto, local, mpirun, torchrun, srun or ssh: who starts them.")
    ] = "auto",
    launcher_args: Annotated[
        str, typer.Option(help="Words for the launcher's command line, as they are.")
    ] = "",
    exported: Annotated[
        list[str] | None,
        typer.Option("-x", metavar="NAME[=VALUE]", help="A variable for the workers of all hosts."),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="auto, gloo, nccl or mpi: what carries the bytes.")
    ] = "auto",
    num_threads: Annotated[
        int | None, typer.Option("--threads", help="Threads of a worker: its share of the cores.")
    ] = None,
    shows_binding: Annotated[
        bool, typer.Option("--show-binding", help="Show the cores of each worker.")
    ] = False,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for rank0.log, rank0.exit.json, ...")
    ] = None,
    grace_s: Annotated[
        float,
        typer.Option("--grace", help="Seconds between asking a worker to end and killing it."),
    ] = 5.0,
    elastic: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Go on with this few and this many of the hosts."),
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(help="How often all may start again after a failure [3].")
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where hosts of --elastic meet [on this one]."),
    ] = None,
    join_timeout_s: Annotated[
        float | None,
        typer.Option("--join-timeout", help="Seconds to wait for MIN hosts [120]."),
    ] = None,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Show the commands that would run, and end.")
    ] = False,
    is_module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")
    ] = False,
) -> None:
    """Run SCRIPT as N workers on this machine or on many.

    Inside a job of PBS, Slurm or Grid Engine its hosts are used; started by mpirun, srun or
    torchrun it is the worker that they made. The output of worker 0 is shown
    with [0] in front and kept in a file, and so on. When a worker fails, the others are ended, and
    its exit code is the exit code of this command.
    """
    from torchmn.launch import (
        RunOptions,
        detect_existing_rank,
        dry_run,
        dry_run_elastic,
        plan_elastic,
        plan_job,
        python_command,
        run_as_rank,
        run_elastic_job,
        run_job,
    )

    wish = RunOptions(
        argv=tuple(python_command(target, args or [], is_module=is_module)),
        script="" if is_module else target,
        num_ranks=num_ranks,
        hostfile=hostfile,
        hosts=hosts,
        num_nodes=num_nodes,
        per_node=per_node,
        launcher=launcher,
        launcher_args=tuple(shlex.split(launcher_args)),
        exported=tuple(exported or ()),
        backend=backend,
        num_threads=num_threads,
        shows_binding=shows_binding,
        log_dir=log_dir,
        grace_s=grace_s,
        elastic=elastic,
        max_restarts=max_restarts,
        rendezvous=rendezvous,
        join_timeout_s=join_timeout_s,
    )
    env = wish.environment(os.environ)
    place = detect_existing_rank(wish, env)
    if place is not None:
        run_as_rank(wish.argv, env, place)
    if elastic is not None:
        elastic_job, why = plan_elastic(wish, env)
        if is_dry:
            typer.echo(dry_run_elastic(elastic_job, env))
            raise typer.Exit
        raise typer.Exit(run_elastic_job(elastic_job, env, why=why))
    job, why = plan_job(wish, env)
    if is_dry:
        typer.echo(dry_run(job, env))
        raise typer.Exit
    raise typer.Exit(run_job(job, env, why=why))
