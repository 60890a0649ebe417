"""``torchmn submit``: write a job script for a scheduler, and submit it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from torchmn.base.errors import UsageError
from torchmn.base.terminal import say
from torchmn.cli.options import Args, Script, SiteFile, add_options, given, values_of
from torchmn.submit.settings import Settings

SCHEDULER_NAMES = ("pbs", "slurm", "grid_engine")
"""As in `torchmn.submit.site.NAMES`, which takes longer to import than a completion may."""
CONTEXT = {"allow_interspersed_args": False}
"""What follows the script is passed to it, options too."""


@add_options(Settings)
def submit(
    script: Script,
    args: Args = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="pbs, slurm or grid_engine (default: the one installed).",
            autocompletion=values_of(SCHEDULER_NAMES),
        ),
    ] = None,
    num_nodes: Annotated[int, typer.Option("--nodes", help="Number of nodes.")] = 1,
    per_node: Annotated[int, typer.Option(help="Number of ranks on each node.")] = 1,
    name: Annotated[
        str | None, typer.Option(help="Name of the job (default: that of the script).")
    ] = None,
    site: SiteFile = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the job script.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the job script without submitting it.")
    ] = False,
    waits: Annotated[
        bool, typer.Option("--wait", help="Follow the job, and exit with its exit status.")
    ] = False,
    requeues: Annotated[
        bool, typer.Option("--requeue", help="Resubmit if the job checkpointed before the limit.")
    ] = False,
    max_requeues: Annotated[
        int | None, typer.Option(help="Maximum number of resubmissions by --requeue (default: 10).")
    ] = None,
    is_module: Annotated[
        bool, typer.Option("-m", "--module", help="Run a Python module: SCRIPT is its name.")
    ] = False,
    **settings: Any,
) -> None:
    """Write a job script that runs SCRIPT on the nodes of a cluster, print it and submit it.

    The job script is plain shell: edit it and submit it by hand as you like.
    """
    from torchmn.cluster.environment_variables import parse_variable
    from torchmn.run.job import python_command
    from torchmn.submit.following import Follower
    from torchmn.submit.request import JobRequest, default_name, find_environment
    from torchmn.submit.script import job_script, make_log_dir, raise_if_folder, write_script
    from torchmn.submit.script import submit as submit_job
    from torchmn.submit.settings import settings_from_options
    from torchmn.submit.site import (
        choose_scheduler,
        find_site,
        installed_schedulers,
        raise_if_no_command,
        read_site,
    )

    if max_requeues is not None and not requeues:
        raise UsageError(f"--max-requeues {max_requeues} has no effect without --requeue: add it.")
    if waits and dry_run:
        raise UsageError("--wait follows a job, and --dry-run submits none: leave one of them out.")
    if output is not None:
        raise_if_folder(output)
    folder, path = Path.cwd(), os.environ.get("PATH")
    found = read_site(find_site(site, folder=folder, home=Path.home()))
    if found.path is not None:
        say(f"using the site file {found.path}")
    wanted, installed = scheduler or found.scheduler, installed_schedulers(path)
    exports = [parse_variable(text, os.environ) for text in settings.pop("exports") or ()]
    own = settings_from_options({"exports": tuple(exports), **given(settings)})
    chosen = choose_scheduler(wanted, installed)
    if not dry_run:
        raise_if_no_command(chosen, path)
    python_command(script, is_module=is_module)  # raises if there is no such script
    merged = own.merged_over(found.settings_for(chosen.name))
    name = default_name(script) if name is None else name
    job = JobRequest(
        script=script,
        args=tuple(args or ()),
        num_nodes=num_nodes,
        ranks_per_node=per_node,
        is_module=is_module,
        max_requeues=(10 if max_requeues is None else max_requeues) if requeues else 0,
        name=name,
        file=str(output or f"{name}.{chosen.name}.sh"),
        environment=find_environment(merged.activate, folder, is_here=not dry_run)
        if merged.activate
        else None,
        settings=merged,
    )
    text = job_script(job, chosen)
    typer.echo(text, nl=False)
    if not dry_run or output is not None:
        make_log_dir(job)
        kept = write_script(text, Path(job.file))
        say(f"job script written to {job.file}" + (f"; the old one is {kept}" if kept else ""))
    if not dry_run:
        job_id = submit_job(job, chosen)
        say(f"submitted {chosen.title} job {job_id}; its output goes to {job.log_dir}/{name}.*")
        if waits:
            follower = Follower(job=job, scheduler=chosen, out=sys.stdout, err=sys.stderr)
            raise typer.Exit(follower.follow(job_id))
