"""Print the report on a terminal, or return it as one JSON object."""

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite

import rich.table
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.text import Text

from torchmn.cluster.units import counted
from torchmn.observe.report.comparison import Comparison
from torchmn.observe.report.finding import Finding
from torchmn.observe.report.summary import Summary, duration
from torchmn.observe.report.tables import (
    Scaling,
    Table,
    links_table,
    scaling_table,
    slow_steps_table,
)
from torchmn.record.records import PHASES

MAX_ROWS = 16
COLORS = ("blue", "cyan", "green", "yellow", "red", "magenta", "magenta", "white", "white", "white")


def show(
    console: Console,
    reports: Sequence[tuple[Summary, Sequence[Finding]]],
    scaling: Scaling | None,
    compared: Comparison | None,
) -> None:
    """Print findings, phases, links and slow steps of each run, and how runs compare."""
    for summary, findings in reports:
        console.print(_run(summary, findings))
    if scaling is not None:
        console.print(_scaling(scaling))
    if compared is not None:
        console.print(Text(compared.text, style="bold"))


def show_findings(
    console: Console,
    reports: Sequence[tuple[Summary, Sequence[Finding]]],
    compared: Comparison | None,
) -> None:
    """Print what limits each run, how two of them compare, and nothing else."""
    for summary, findings in reports:
        if len(reports) > 1:
            console.print(Text(str(summary.run.folder), style="bold"))
        for part in _findings(findings):
            console.print(part)
    if compared is not None:
        console.print(Text(compared.text, style="bold"))


def _findings(findings: Sequence[Finding]) -> list[RenderableType]:
    if not findings:
        return [Text("Nothing stands out: no cause costs 2 % of a step.", style="green")]
    return [
        Text.assemble(
            (
                f"{number}. {finding.share:.0%} of each step  ",
                "bold red" if finding.is_fault else "bold yellow",
            ),
            (f"{finding.what}: ", "bold"),
            f"{finding.evidence}. {finding.cure}",
        )
        for number, finding in enumerate(findings, 1)
    ]


def _run(summary: Summary, findings: Sequence[Finding]) -> RenderableType:
    run = summary.run
    rate = summary.samples_per_s
    title = Text.assemble((str(run.folder), "bold"))
    facts = (
        f"{counted(run.size, 'rank')} on {counted(len(summary.hosts), 'host')}, "
        f"{counted(len(summary.step), 'step', ',')}; "
        f"mean step {duration(summary.step_s)}"
        + ("" if rate is None else f", {rate:,.1f} samples/s")
        + f"; exchange not hidden {summary.share_of_exposed_exchange:.1%}, "
        f"waiting for late ranks {summary.share_of_waiting:.1%}"
    )
    parts: list[RenderableType] = [title, facts]
    parts.extend(Text(f"note: {note}", style="dim") for note in summary.notes)
    parts += ["", *_findings(findings), ""]
    parts.append(_phases(summary))
    for table in (links_table(summary), slow_steps_table(summary)):
        if table.rows:
            parts.append(_shown(table))
    return Group(*parts, "")


def _phases(summary: Summary) -> RenderableType:
    """Print per phase its share of the mean step and the ranks with least and most of it."""
    means = summary.mean_phases
    table = _table("phase", "mean", "share", "shortest on", "longest on", "")
    for index, phase in enumerate(PHASES):
        column = means[:, index]
        share = column.mean() / summary.step_s
        if not column.any():
            continue
        low, high = int(column.argmin()), int(column.argmax())
        table.add_row(
            phase,
            duration(float(column.mean())),
            f"{share:.1%}",
            f"rank {summary.ranks[low].start.rank}: {duration(float(column[low]))}",
            f"rank {summary.ranks[high].start.rank}: {duration(float(column[high]))}",
            Text("█" * round(share * 30), style=COLORS[index % len(COLORS)]),
        )
    return table


def _scaling(scaling: Scaling) -> RenderableType:
    table = _shown(scaling_table(scaling))
    if scaling.serial_share is None:
        return table
    return Group(table, f"Amdahl's law fits with a serial part of {scaling.serial_share:.2%}.")


def _shown(found: Table) -> rich.table.Table:
    table = _table(*found.columns)
    for row in found.rows[:MAX_ROWS]:
        table.add_row(*map(escape, row))
    if len(found.rows) > MAX_ROWS:
        table.add_row(f"and {len(found.rows) - MAX_ROWS} others")
    return table


def _table(*columns: str) -> rich.table.Table:
    table = rich.table.Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left")
    return table


FORMAT = 1


def as_json(
    reports: Sequence[tuple[Summary, Sequence[Finding]]],
    scaling: Scaling | None,
    compared: Comparison | None,
) -> dict[str, object]:
    """Return the JSON object of `docs/reference/report.md`; null for numbers not finite."""
    return {
        "format": FORMAT,
        "runs": [_run_as_json(summary, findings) for summary, findings in reports],
        "scaling": None if scaling is None else _finite(asdict(scaling)),
        "comparison": None if compared is None else _finite(asdict(compared)),
    }


def _run_as_json(summary: Summary, findings: Sequence[Finding]) -> object:
    run = summary.run
    return _finite(
        {
            "folder": str(run.folder),
            "num_ranks": run.size,
            "hosts": {
                host: [summary.ranks[index].start.rank for index in indices]
                for host, indices in summary.hosts.items()
            },
            "is_running": run.is_running,
            "is_sampled": run.is_sampled,
            "notes": list(summary.notes),
            "num_steps_read": len(summary.step),
            "first_step": int(summary.step[0]),
            "last_step": int(summary.step[-1]),
            "step_s": summary.step_s,
            "samples_per_s": summary.samples_per_s,
            "share_of_exposed_exchange": summary.share_of_exposed_exchange,
            "share_of_waiting": summary.share_of_waiting,
            "findings": [asdict(finding) for finding in findings],
            "phases_s": {
                str(rank.start.rank): dict(zip(PHASES, map(float, means), strict=True))
                for rank, means in zip(summary.ranks, summary.mean_phases, strict=True)
            },
            "links": [asdict(link) for link in summary.links],
            "slowest_steps": [asdict(step) for step in summary.slowest_steps()],
            "settings": summary.ranks[0].settings,
            "versions": summary.ranks[0].start.versions,
        }
    )


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
