"""``torchmn report``: report on runs from their records, as a page, as text or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from torchmn.base.errors import DataError, UsageError
from torchmn.base.private_files import write_whole
from torchmn.base.terminal import say


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Log folders of runs, or their folders of records (default: torchmn-logs/latest).",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Where to write the page (default: report.html in the first folder)."),
    ] = None,
    is_text: Annotated[
        bool, typer.Option("--text", help="Print the report instead of writing the page.")
    ] = False,
    is_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON instead of writing the page.")
    ] = False,
    metrics: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the last steps as OpenMetrics text."),
    ] = None,
) -> None:
    """Show where the time of the steps of a run goes, what limits it and what to do.

    Runs may continue meanwhile. Two runs are compared: the exit status is 1 if the second one is
    slower, 0 if not, and 2 if they cannot be compared. Runs with different numbers of ranks show
    how the training scales.
    """
    from torchmn.observe.report.metrics import write_metrics

    runs = runs or [Path("torchmn-logs", "latest")]
    if sum((is_text, is_json, metrics is not None)) > 1:
        raise UsageError("--text, --json and --metrics exclude each other: give one of them.")
    if output is not None and (is_text or is_json or metrics is not None):
        raise UsageError("--output is for the page: leave out --text, --json and --metrics.")
    if metrics is None:
        _report(runs, output, is_text=is_text, is_json=is_json)
        return
    if len(runs) > 1:
        raise UsageError(f"--metrics shows one run, and {len(runs)} are named.")
    write_metrics(runs[0], metrics)


def _report(folders: list[Path], output: Path | None, *, is_text: bool, is_json: bool) -> None:
    from rich.console import Console

    from torchmn.observe.read.run_reader import MAX_NBYTES, read_run
    from torchmn.observe.report.comparison import Comparison, compare
    from torchmn.observe.report.findings import find
    from torchmn.observe.report.page import page
    from torchmn.observe.report.summary import summarize
    from torchmn.observe.report.tables import scaling_of
    from torchmn.observe.report.text import as_json, show, show_findings

    max_nbytes = MAX_NBYTES // len(folders)
    summaries = [summarize(read_run(folder, max_nbytes=max_nbytes)) for folder in folders]
    reports = [(summary, find(summary)) for summary in summaries]
    scaling = scaling_of(summaries) if len(summaries) > 1 else None
    compared: Comparison | None = None
    problem: DataError | None = None
    if len({summary.run.size for summary in summaries}) == 1 and len(summaries) == 2:
        try:
            compared = compare(*summaries)
        except DataError as error:  # raised at the end: each run can be reported on
            problem = error
    shown = scaling if compared is None else None  # JSON has both
    if is_json:
        typer.echo(json.dumps(as_json(reports, scaling, compared), indent=1))
    elif is_text:
        show(Console(), reports, shown, compared)
    else:
        folder = summaries[0].run.folder
        file = output or (folder.parent if folder.name == "steps" else folder) / "report.html"
        try:
            text = page(reports, shown, compared)
            write_whole(file, text.encode(errors="replace"), mode=0o666)
        except OSError as error:
            raise UsageError(
                f"The page {str(file)!r} cannot be written: {error.strerror}. "
                "Choose another file with --output."
            ) from None
        show_findings(Console(), reports, compared)
        say(f"the report is in {file}")
    if problem is not None:
        raise problem
    if compared is not None and compared.verdict == "slower":
        raise typer.Exit(1)
