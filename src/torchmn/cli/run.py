"""``torchmn run``: run a script on several ranks, on this host or on many."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.completion import show_callback

from torchmn.base.log import LOG_VARIABLE, Log, use_level
from torchmn.base.terminal import say
from torchmn.cli.options import Args, Script, add_options, given
from torchmn.cluster.environment_variables import split_words
from torchmn.run.job import program_command, python_command
from torchmn.run.plan import RunOptions, detect_existing_rank, plan_job
from torchmn.run.torchrun_options import TorchrunOptions, translate

CONTEXT = {
    "allow_interspersed_args": False,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
"""What follows the script is passed to it, options too. In option names ``_`` equals ``-``."""


@add_options(TorchrunOptions)
@add_options(RunOptions)
def run(
    target: Script,
    args: Args = None,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands without running them.")
    ] = False,
    is_quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help=f"No notes of torchmn: {LOG_VARIABLE}=warning.")
    ] = False,
    is_module: Annotated[
        bool,
        typer.Option(
            *("-m", "--module"),
            help="Run a Python module: SCRIPT is its name.",
            envvar="PET_MODULE",
            show_envvar=False,
        ),
    ] = False,
    _completion: Annotated[
        str | None,
        typer.Option(
            "--print-completion",
            hidden=True,
            is_eager=True,  # it needs no SCRIPT
            expose_value=False,
            callback=show_callback,
        ),
    ] = None,
    **options: Any,
) -> None:
    """Run SCRIPT on N ranks, on this host or on many.

    In a job of PBS, Slurm or Grid Engine its hosts are used. Started by mpirun, srun or torchrun,
    this command becomes the rank that they started. Output lines are printed with their rank, as
    in "[0] ...", and written to a log file per rank. When a rank fails, all others are terminated,
    and this command exits with the exit code of that rank. The options of torchrun are accepted.
    """
    from torchmn.cluster.network import is_this_host
    from torchmn.run.elastic.join import join_job
    from torchmn.run.rank_environment import run_as_rank
    from torchmn.run.start import dry_run, run_job

    if is_quiet:
        options["exported"] = [*(options["exported"] or ()), f"{LOG_VARIABLE}=warning"]
    launcher, *launcher_args = split_words(options.pop("launcher"), source="--launcher") or ("",)
    has_python = not options.pop("no_python")
    chosen, notes = translate(given(options), os.environ)
    request = RunOptions(
        argv=tuple(
            python_command(target, args or [], is_module=is_module)
            if has_python
            else program_command(target, args or [], is_module=is_module)
        ),
        script="" if is_module or not has_python else target,
        launcher=launcher,
        launcher_args=tuple(launcher_args),
        **chosen,
    )
    env = request.environment(os.environ)
    use_level(env.get(LOG_VARIABLE, ""))
    for note in notes:
        Log(__name__).info("%s", note)
    misplaced = next((word for word in args or () if word in ("-n", "-np")), "")
    if misplaced and request.num_ranks is None:
        say(
            f"warning: {misplaced} comes after the script, so it is an argument of the script. "
            "Options of torchmn run come before the script."
        )
    existing = detect_existing_rank(request, env)
    if existing is not None:
        run_as_rank(request.argv, env, existing)
    if request.meeting is not None and not is_this_host(request.meeting[0]) and not is_dry:
        raise typer.Exit(join_job(request, env))
    job, why = plan_job(request, env)
    if is_dry:
        if job.warning:
            say(job.warning)
        typer.echo(dry_run(job, env))
        raise typer.Exit
    raise typer.Exit(run_job(job, env, why=why))
