"""``torchmn run``: run a script on several ranks, on this host or on many."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

CONTEXT = {"allow_interspersed_args": False}
"""What follows the script are arguments of the script, options too."""


def run(
    target: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The script, or a module with -m.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")
    ] = None,
    num_ranks: Annotated[
        int | None,
        typer.Option("-n", help="Number of ranks (default: all slots of the hosts, or 1)."),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="File with a line NAME slots=N for each host.")
    ] = None,
    hosts: Annotated[str | None, typer.Option(help="Hosts and slots, such as a:4,b:2.")] = None,
    num_nodes: Annotated[int | None, typer.Option("--nodes", help="Number of hosts.")] = None,
    per_node: Annotated[int | None, typer.Option(help="Number of ranks on each host.")] = None,
    launcher: Annotated[
        str, typer.Option(help="Launcher: auto, local, mpirun, torchrun, srun or ssh.")
    ] = "auto",
    launcher_args: Annotated[
        str, typer.Option(help="Extra arguments, passed verbatim to the launcher.")
    ] = "",
    exported: Annotated[
        list[str] | None,
        typer.Option(
            "-x",
            metavar="NAME[=VALUE]",
            help="Environment variable to export to all ranks (repeatable).",
        ),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="Communication backend: auto, gloo, nccl or mpi.")
    ] = "auto",
    num_threads: Annotated[
        int | None,
        typer.Option("--threads", help="Threads of each rank (default: its share of the cores)."),
    ] = None,
    shows_binding: Annotated[
        bool, typer.Option("--show-binding", help="Print the cores of each rank.")
    ] = False,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for rank0.log, rank0.exit.json, ...")
    ] = None,
    grace_s: Annotated[
        float,
        typer.Option("--grace", help="Seconds between terminating a rank and killing it."),
    ] = 5.0,
    elastic: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Elastic: minimum and maximum number of hosts."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(help="Elastic: maximum restarts after a rank failure (default: 3)."),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Elastic: rendezvous endpoint (default: this host)."
        ),
    ] = None,
    join_timeout_s: Annotated[
        float | None,
        typer.Option("--join-timeout", help="Elastic: seconds to wait for MIN hosts (120)."),
    ] = None,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands without running them.")
    ] = False,
    is_module: Annotated[
        bool, typer.Option("-m", "--module", help="Run a Python module: SCRIPT is its name.")
    ] = False,
) -> None:
    """Run SCRIPT on N ranks, on this host or on many.

    In a job of PBS, Slurm or Grid Engine its hosts are used. Started by mpirun, srun or torchrun,
    this command becomes the rank that they started. Output lines are printed with their rank, as
    in "[0] ...", and written to a log file per rank. When a rank fails, all others are terminated,
    and this command exits with the exit code of that rank.
    """
    from torchmn import launch

    options = launch.RunOptions(
        argv=tuple(launch.python_command(target, args or [], is_module=is_module)),
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
    env = options.environment(os.environ)
    existing = launch.detect_existing_rank(options, env)
    if existing is not None:
        launch.run_as_rank(options.argv, env, existing)
    if elastic is not None:
        elastic_job, why = launch.plan_elastic(options, env)
        if is_dry:
            typer.echo(launch.dry_run_elastic(elastic_job, env))
            raise typer.Exit
        raise typer.Exit(launch.run_elastic_job(elastic_job, env, why=why))
    job, why = launch.plan_job(options, env)
    if is_dry:
        typer.echo(launch.dry_run(job, env))
        raise typer.Exit
    raise typer.Exit(launch.run_job(job, env, why=why))
