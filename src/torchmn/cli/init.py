"""``torchmn init``: write a training script that runs, and a job file for one's cluster."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from torchmn.base.errors import UnknownNameError, UsageError
from torchmn.cli.options import SiteFile, values_of
from torchmn.cli.submit import SCHEDULER_NAMES
from torchmn.cluster.units import counted
from torchmn.submit.settings import Settings

KINDS = ("image", "text", "tabular")
NO_SCHEDULER = "none"
SCRIPT = "train.py"


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where to write (default: this folder).")
    ] = Path(),
    kind: Annotated[
        str,
        typer.Option(
            help="What the model learns from: image, text or tabular.",
            autocompletion=values_of(KINDS),
        ),
    ] = "image",
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="pbs, slurm, grid_engine or none (default: the one installed).",
            autocompletion=values_of((*SCHEDULER_NAMES, NO_SCHEDULER)),
        ),
    ] = None,
    num_nodes: Annotated[int, typer.Option("--nodes", help="Number of nodes of the job.")] = 1,
    per_node: Annotated[int, typer.Option(help="Number of ranks on each node.")] = 1,
    walltime: Annotated[
        str, typer.Option(help="Time limit of the job as hours:minutes:seconds.")
    ] = "01:00:00",
    site: SiteFile = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files; the old ones are kept as NAME~.")
    ] = False,
) -> None:
    """Write train.py, which trains at once on built-in data, and a job file for a scheduler.

    The script has what a long training needs: parts of the data for each worker, exact evaluation,
    checkpoints, and saving before the job's time limit. Asks nothing, and replaces nothing without
    --force.
    """
    from torchmn.submit.script import write_script
    from torchmn.submit.settings import settings_from_options
    from torchmn.submit.site import find_site, raise_if_unknown, read_site

    if kind not in KINDS:
        raise UnknownNameError("kind", kind, KINDS)
    found = read_site(find_site(site, folder=Path.cwd(), home=Path.home()))
    wanted = scheduler or found.scheduler
    chosen = wanted or _installed(os.environ.get("PATH"))
    raise_if_unknown(chosen, NO_SCHEDULER)
    texts = {SCRIPT: _script(kind)}
    if chosen != NO_SCHEDULER:
        own = settings_from_options({"walltime": walltime})
        name, text = _job_file(
            chosen, own.merged_over(found.settings_for(chosen)), num_nodes, per_node
        )
        texts[name] = text
    existing = [str(folder / name) for name in texts if (folder / name).exists()]
    if existing and not force:
        raise UsageError(
            f"{' and '.join(existing)} {'exist' if len(existing) > 1 else 'exists'} already: use "
            "another folder, or --force, which keeps "
            f"{'the old ones' if len(existing) > 1 else 'the old one'} as NAME~."
        )
    _make(folder)
    for name, text in texts.items():
        is_shell = name.endswith(".sh")
        mode = 0o700 if is_shell else 0o600
        kept = write_script(text, folder / name, mode=mode, cure="name another folder")
        typer.echo(f"{folder / name}" + (f" (the old one is {kept})" if kept else ""))
    for line in _next_steps(folder, chosen, [*texts][-1], num_nodes * per_node):
        typer.echo(line)


def _script(kind: str) -> str:
    """Return the script: the part for this kind of data, and the part common to all."""
    common = "\n\n\ndef evaluate("
    own, whole = (
        (resources.files("torchmn.cli.templates") / f"{name}.py").read_text("utf-8")
        for name in (kind, "image")
    )
    return own.partition(common)[0].rstrip() + "".join(whole.partition(common)[1:])


def _installed(path: str | None) -> str:
    """Return the only scheduler of this cluster, or `NO_SCHEDULER` if it has none or several."""
    from torchmn.submit.site import installed_schedulers

    names = installed_schedulers(path)
    return names[0] if len(names) == 1 else NO_SCHEDULER


def _job_file(
    scheduler: str, settings: Settings, num_nodes: int, ranks_per_node: int
) -> tuple[str, str]:
    """Return name and text of the job file that `torchmn submit` would write in the folder."""
    from torchmn.submit.request import JobRequest, find_environment
    from torchmn.submit.script import job_script
    from torchmn.submit.site import SCHEDULERS

    if settings.activate and Path(settings.activate).expanduser().is_dir():
        # the job is submitted in another folder
        where = Path(settings.activate).expanduser().absolute()
        settings = replace(settings, activate=str(where))
    job = JobRequest(
        script=SCRIPT,
        name="train",
        file=f"train.{scheduler}.sh",
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        max_requeues=10,
        environment=find_environment(settings.activate, Path.cwd(), is_here=False)
        if settings.activate
        else None,
        settings=settings,
    )
    return job.file, job_script(job, SCHEDULERS[scheduler])


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"The folder {folder} cannot be created ({error.strerror}): name another one."
        ) from None


def _next_steps(folder: Path, scheduler: str, job_file: str, num_ranks: int) -> list[str]:
    from torchmn.submit.site import SCHEDULERS

    change = [] if folder == Path() else [f"  cd {shlex.quote(str(folder))}"]
    lines = ["", "Try it here, on two workers:", *change, f"  torchmn run -n 2 {SCRIPT}"]
    if scheduler == NO_SCHEDULER:
        return lines
    submit = SCHEDULERS[scheduler].submit_command[0]
    command = f"mkdir -p torchmn-logs && {submit} {job_file}"
    return [*lines, f"As a job of {counted(num_ranks, 'rank')}:", f"  {command}"]
