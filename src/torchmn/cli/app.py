"""The subcommands of ``torchmn``, and errors as one line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from torchmn.base.errors import LaunchError, TorchmnError
from torchmn.cli import doctor, inspect, plan, report, run, submit
from torchmn.cli.versions import versions_text
from torchmn.cluster.environment_variables import TRACEBACK_VARIABLE


class _Group(TyperGroup):
    """Commands that tell Ctrl-C from an exit status of 130, to which typer converts it."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command, as the base class does. Raises typer.Abort: Ctrl-C."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


app = typer.Typer(
    name="torchmn",
    cls=_Group,
    help="Distributed training of PyTorch models.",
    pretty_exceptions_enable=False,
)
app.command("run", context_settings=run.CONTEXT)(run.run)
app.command("doctor")(doctor.doctor)
app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.command("submit", context_settings=submit.CONTEXT)(submit.submit)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(
        False, "-V", "--version", help="Show versions and available engines, and exit."
    ),
) -> None:
    if version:
        typer.echo(versions_text(os.environ))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run_command(args: Sequence[str] | None) -> tuple[str, int]:
    """Run the command line; return what to say of an error, else nothing, and the exit status.

    That is 2 for an invalid request, 1 if the job did not start. Raises KeyboardInterrupt.
    """
    try:
        words = None if args is None else list(args)
        code = app(args=words, standalone_mode=False, prog_name="torchmn")
    except TorchmnError as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        return str(error), 1 if isinstance(error, LaunchError) else 2
    except FileNotFoundError:
        if _has_working_directory():
            raise
        return "The working directory was removed: cd to one that exists.", 2
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        # click's errors: newer versions of typer have a click of their own, so no base class helps
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        return _with_value(error) or str(format_message()), 2
    return "", code if isinstance(code, int) else 0


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _with_value(error: Exception) -> str:
    """Describe a value that is not a number; empty for other errors."""
    # typer's own message leaves the value out.
    problems = getattr(error.__cause__, "errors", None)  # of pydantic, which newer versions use
    option = next(iter(getattr(getattr(error, "param", None), "opts", ())), "")
    if not option or not callable(problems):
        return ""
    problem = problems()[0]
    kind = str(problem["type"]).partition("_")[0]
    rule = {"int": "a whole number", "float": "a number"}.get(kind)
    if not rule:
        return ""
    return f"{option} must be {rule}, got {str(problem['input'])!r}."
