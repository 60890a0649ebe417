"""``torchmn submit``: make a job script for PBS, Slurm or Grid Engine, and submit it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

CONTEXT = {"allow_interspersed_args": False}
"""What stands behind the script belongs to the script, options too."""

_Text = str | None
_Texts = list[str] | None


def submit(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script to train with.")],
    args: Annotated[
        _Texts, typer.Argument(metavar="[ARGS]...", help="Its arguments, as they are.")
    ] = None,
    scheduler: Annotated[
        _Text, typer.Option(help="pbs, slurm or grid_engine; else the one that is here.")
    ] = None,
    num_nodes: Annotated[int, typer.Option("--nodes", help="Number of nodes.")] = 1,
    per_node: Annotated[int, typer.Option(help="Number of workers on each node.")] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads of each worker.")] = None,
    walltime: Annotated[_Text, typer.Option(help="Time limit, as in 00:10:00.")] = None,
    queue: Annotated[_Text, typer.Option(help="Queue, or Slurm's partition.")] = None,
    group: Annotated[_Text, typer.Option(help="Group, account or project that pays.")] = None,
    name: Annotated[_Text, typer.Option(help="Name of the job; else that of the script.")] = None,
    modules: Annotated[
        _Texts, typer.Option("--module", help="Environment module to load (repeatable).")
    ] = None,
    activate: Annotated[
        _Text, typer.Option(metavar="ENV", help="Folder of a venv, or a conda environment.")
    ] = None,
    exports: Annotated[
        _Texts, typer.Option("--export", metavar="NAME=VALUE", help="Variable (repeatable).")
    ] = None,
    join_output: Annotated[
        bool | None,
        typer.Option("--join-output/--split-output", help="Output and errors in one file."),
    ] = None,
    log_dir: Annotated[_Text, typer.Option(help="Folder for what the job prints.")] = None,
    directives: Annotated[
        _Texts, typer.Option("--directive", help="One more line of the header (repeatable).")
    ] = None,
    site: Annotated[
        Path | None, typer.Option(help="File of the site; else torchmn.toml, here or at home.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the job script.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do not submit it.")] = False,
    waits: Annotated[
        bool, typer.Option("--wait", help="Show its output; its exit status becomes ours.")
    ] = False,
    requeues: Annotated[
        bool, typer.Option("--requeue", help="Go on in a new job if it saved in time.")
    ] = False,
) -> None:
    """Make a job script that runs SCRIPT on the nodes of a cluster, show it and submit it.

    The job script is plain shell: edit it and submit it by hand as you like.
    """
    from torchmn.launch import python_command
    from torchmn.launch import submit as jobs

    folder, path = Path.cwd(), os.environ.get("PATH")
    found = jobs.read_site(jobs.find_site(site, folder=folder, home=Path.home()))
    if found.path is not None:
        _say(f"the site's file is {found.path}")
    chosen = jobs.choose_scheduler(scheduler or found.scheduler, jobs.installed_schedulers(path))
    if not dry_run:
        jobs.raise_if_no_command(chosen, path)
    python_command(script)  # refuses a script that is not there
    settings = jobs.Settings(
        queue=queue,
        group=group,
        walltime=walltime,
        threads=threads,
        activate=activate,
        log_dir=log_dir,
        join_output=join_output,
        modules=tuple(modules or ()),
        directives=tuple(directives or ()),
        exports=tuple(map(jobs.parse_export, exports or ())),
    ).over(found.settings_for(chosen.name))
    name = jobs.default_name(script) if name is None else name
    job = jobs.JobRequest(
        script=script,
        args=tuple(args or ()),
        name=name,
        file=str(output or f"{name}.{chosen.name}.sh"),
        num_nodes=num_nodes,
        ranks_per_node=per_node,
        requeues=requeues,
        environment=jobs.find_environment(settings.activate, folder) if settings.activate else None,
        settings=settings,
    )
    text = jobs.job_script(job, chosen)
    typer.echo(text, nl=False)
    if not dry_run or output is not None:
        kept = jobs.write_script(text, Path(job.file))
        _say(f"the job script is {job.file}" + (f"; what was there is {kept}" if kept else ""))
    if not dry_run:
        job_id = jobs.submit(job, chosen)
        _say(f"{chosen.title} job {job_id}; its output goes to {job.log_dir}/{name}.*")
        if waits:
            follower = jobs.Follower(job=job, scheduler=chosen, out=sys.stdout, err=sys.stderr)
            raise typer.Exit(follower.follow(job_id))


def _say(sentence: str) -> None:
    print(f"torchmn: {sentence}", file=sys.stderr, flush=True)
