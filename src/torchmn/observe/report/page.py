"""Write the report as one HTML file that needs no network and nothing but a browser."""

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from torchmn import __version__
from torchmn.observe.report.charts import Chart, run_charts, scaling_charts
from torchmn.observe.report.comparison import Comparison
from torchmn.observe.report.finding import Finding
from torchmn.observe.report.summary import Summary, duration
from torchmn.observe.report.tables import Scaling, Table, placement_table, slow_steps_table


def page(
    reports: Sequence[tuple[Summary, Sequence[Finding]]],
    scaling: Scaling | None,
    compared: Comparison | None,
) -> str:
    """Return the whole page."""
    body = _Body()
    body.add("<header><h1>torchmn report</h1>")
    made = time.strftime("%Y-%m-%d %H:%M")
    body.add(f"<p class='muted'>made {made} by torchmn {escape(__version__)}</p></header><main>")
    if compared is not None:
        _add_comparison(body, compared)
    largest_first = sorted(reports, key=lambda report: -report[0].run.size)
    for number, (summary, findings) in enumerate(largest_first):
        body.add(f"<section><h2>{escape(_name(summary))}</h2>")
        _add_findings(body, summary, findings)
        if scaling is not None and number == 0:
            body.add("<h3>Scaling over all runs</h3>")
            body.charts(list(scaling_charts(scaling)), has_one_table=True)
        _add_charts(body, summary)
        body.add("</section>")
    body.add("</main>")
    style, own_script = (_beside(name) for name in ("page.css", "page.js"))
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<link rel='icon' href='data:,'>"
        f"<title>torchmn report: {escape(', '.join(_name(s) for s, _ in reports))}</title>"
        f"<style>{style}</style></head><body>{''.join(body.parts)}<script>{own_script}</script></body></html>\n"
    )


def _beside(name: str) -> str:
    """Read a file in the folder of this module."""
    return Path(__file__).with_name(name).read_text()


class _Body:
    """Parts of the body."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def add(self, html: str) -> None:
        self.parts.append(html)

    def charts(self, charts: Sequence[Chart], *, has_one_table: bool = False) -> None:
        self.add("<div class='grid'>")
        for chart in charts:
            size = "small" if chart.is_small else "wide"
            self.add(
                f"<figure class='{size}'><figcaption>{escape(chart.title)}</figcaption>"
                f"<div class='chart' role='img' "
                f"aria-label='{escape(chart.description, quote=True)}'>{chart.drawing}</div>"
            )
            if not has_one_table:
                self.table(chart.table, chart.title)
            self.add("</figure>")
        self.add("</div>")
        if has_one_table and charts:
            self.table(charts[0].table, "the runs")

    def table(self, table: Table, title: str, *, is_open: bool = False) -> None:
        heads = "".join(f"<th scope='col'>{escape(name)}</th>" for name in table.columns)
        rows = "".join(
            f"<tr><th scope='row'>{escape(first)}</th>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + "</tr>"
            for first, *cells in table.rows
        )
        label = escape(title, quote=True)
        inner = (
            f"<div class='scroll' tabindex='0' role='region' aria-label='{label}'><table>"
            f"<caption class='hidden'>{label}</caption><thead><tr>{heads}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )
        if is_open:
            self.add(inner)
        else:
            self.add(f"<details><summary>Table: {label}</summary>{inner}</details>")


def _add_findings(body: _Body, summary: Summary, findings: Sequence[Finding]) -> None:
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
    body.add("<dl class='facts'>")
    body.add("".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in facts))
    body.add("</dl><h3>What limits this run</h3>")
    if findings:
        body.add("<ol class='findings'>")
        for finding in findings:
            kind = "fault" if finding.is_fault else "cost"
            body.add(
                f"<li class='{kind}'><p class='share'>{finding.share:.0%}<span> of each step</span>"
                f"</p><div><p><strong>{escape(finding.what)}</strong>: "
                f"{escape(finding.evidence)}.</p>"
                f"<p class='cure'>{escape(finding.cure)}</p></div></li>"
            )
        body.add("</ol>")
    else:
        body.add("<p>Nothing stands out: no cause costs 2 % of a step.</p>")
    if summary.batch_advice is not None:
        body.add(f"<h3>The batch</h3><p>{escape(summary.batch_advice)}</p>")
    if summary.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in summary.notes)
        body.add(f"<h3>About the records</h3><ul class='notes'>{notes}</ul>")


def _add_comparison(body: _Body, compared: Comparison) -> None:
    body.add("<section><h2>B compared with A</h2>")
    for line in compared.text.splitlines():
        body.add(f"<p>{escape(line)}</p>")
    body.add("</section>")


def _add_charts(body: _Body, summary: Summary) -> None:
    body.add("<h3>Where the time goes</h3>")
    body.charts(list(run_charts(summary)))
    slow = slow_steps_table(summary)
    if slow.rows:
        body.add("<h3>The slowest steps</h3>")
        body.table(slow, "the slowest steps", is_open=True)
    body.add("<h3>Settings and placement</h3>")
    rows = list(summary.settings_and_versions.items())
    body.table(Table(columns=("what", "value"), rows=rows), "settings and versions")
    body.table(placement_table(summary), "placement of ranks")


def _name(summary: Summary) -> str:
    folder = summary.run.folder.resolve()
    return folder.parent.name if folder.name == "steps" else folder.name
