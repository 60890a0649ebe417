"""Write the report as one HTML file that needs no network and nothing but a browser."""

import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from torchmn import __version__
from torchmn.observe.report.charts import run_charts
from torchmn.observe.report.comparison import Comparison
from torchmn.observe.report.finding import Finding
from torchmn.observe.report.summary import Summary, duration
from torchmn.observe.report.tables import (
    MAX_ROWS,
    Scaling,
    Table,
    links_table,
    memory_table,
    placement_table,
    scaling_table,
    slow_steps_table,
)


def page(
    reports: Sequence[tuple[Summary, Sequence[Finding]]],
    scaling: Scaling | None,
    compared: Comparison | None,
) -> str:
    """Return the whole page."""
    style, own_script = (_beside(name) for name in ("page.css", "page.js"))
    body = "".join(_body(reports, scaling, compared))
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<link rel='icon' href='data:,'>"
        f"<title>torchmn report: {escape(', '.join(_name(s) for s, _ in reports))}</title>"
        f"<style>{style}</style></head><body>{body}<script>{own_script}</script></body></html>\n"
    )


def _beside(name: str) -> str:
    """Read a file in the folder of this module."""
    return Path(__file__).with_name(name).read_text()


def _body(
    reports: Sequence[tuple[Summary, Sequence[Finding]]],
    scaling: Scaling | None,
    compared: Comparison | None,
) -> Iterator[str]:
    yield "<header><h1>torchmn report</h1>"
    made = time.strftime("%Y-%m-%d %H:%M")
    yield f"<p class='muted'>made {made} by torchmn {escape(__version__)}</p></header><main>"
    if compared is not None:
        yield "<section><h2>B compared with A</h2>"
        yield from (f"<p>{escape(line)}</p>" for line in compared.text.splitlines())
        yield "</section>"
    largest_first = sorted(reports, key=lambda report: -report[0].run.size)
    for number, (summary, findings) in enumerate(largest_first):
        yield f"<section><h2>{escape(_name(summary))}</h2>"
        yield from _findings(summary, findings)
        if scaling is not None and number == 0:
            yield from _titled("Scaling over all runs", scaling_table(scaling))
        yield from _details(summary)
        yield "</section>"
    yield "</main>"


def _charts(summary: Summary) -> Iterator[str]:
    yield "<div class='grid'>"
    for chart in run_charts(summary):
        size = "small" if chart.is_small else "wide"
        yield (
            f"<figure class='{size}'><figcaption>{escape(chart.title)}</figcaption>"
            f"<div class='chart' role='img' "
            f"aria-label='{escape(chart.description, quote=True)}'>{chart.drawing}</div>"
            f"{_folded(chart.table, chart.title)}</figure>"
        )
    yield "</div>"


def _titled(title: str, table: Table) -> Iterator[str]:
    """Yield the first rows of a table under a heading, unless it is empty."""
    if table.rows:
        shown = Table(columns=table.columns, rows=table.rows[:MAX_ROWS])
        yield f"<h3>{escape(title)}</h3>{_table(shown, title)}"


def _folded(table: Table, title: str) -> str:
    """Return a table that is shown on a click."""
    summary = escape(title, quote=True)
    return f"<details><summary>Table: {summary}</summary>{_table(table, title)}</details>"


def _table(table: Table, title: str) -> str:
    heads = "".join(f"<th scope='col'>{escape(name)}</th>" for name in table.columns)
    rows = "".join(
        f"<tr><th scope='row'>{escape(first)}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for first, *cells in table.rows
    )
    label = escape(title, quote=True)
    return (
        f"<div class='scroll' tabindex='0' role='region' aria-label='{label}'><table>"
        f"<caption class='hidden'>{label}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _findings(summary: Summary, findings: Sequence[Finding]) -> Iterator[str]:
    run = summary.run
    rate = summary.samples_per_s
    facts = [
        ("ranks", f"{run.size}"),
        ("hosts", f"{len(summary.hosts)}"),
        ("mean step", duration(summary.step_s)),
        ("samples/s", "unknown" if rate is None else f"{rate:,.1f}"),
        ("exchange not hidden", f"{summary.share_of_exposed_exchange:.1%}"),
        ("waiting for late ranks", f"{summary.share_of_waiting:.1%}"),
    ]
    yield "<dl class='facts'>"
    yield "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in facts)
    yield "</dl><h3>What limits this run</h3>"
    if findings:
        yield "<ol class='findings'>"
        for finding in findings:
            kind = "fault" if finding.is_fault else "cost"
            yield (
                f"<li class='{kind}'><p class='share'>{finding.share:.0%}<span> of each step</span>"
                f"</p><div><p><strong>{escape(finding.what)}</strong>: "
                f"{escape(finding.evidence)}.</p>"
                f"<p class='cure'>{escape(finding.cure)}</p></div></li>"
            )
        yield "</ol>"
    else:
        yield "<p>Nothing stands out: no cause costs 2 % of a step.</p>"
    if summary.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in summary.notes)
        yield f"<h3>About the records</h3><ul class='notes'>{notes}</ul>"


def _details(summary: Summary) -> Iterator[str]:
    yield "<h3>Where the time goes</h3>"
    yield from _charts(summary)
    yield from _titled("The slowest steps", slow_steps_table(summary))
    yield from _titled("Links between hosts", links_table(summary))
    yield from _titled("Memory", memory_table(summary))
    yield "<h3>Settings and placement</h3>"
    rows = list(summary.settings_and_versions.items())
    yield _folded(Table(columns=("what", "value"), rows=rows), "settings and versions")
    yield _folded(placement_table(summary), "placement of ranks")


def _name(summary: Summary) -> str:
    folder = summary.run.folder.resolve()
    return folder.parent.name if folder.name == "steps" else folder.name
