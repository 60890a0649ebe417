"""The report as one HTML file that needs no network.

Charts are drawn by plotly.js, which the package ``plotly`` brings and which is written into the
page. It was chosen for one script without other packages, charts as vectors that print well, and
heatmaps of any size; the script is 4.8 MB of each page.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from html import escape

from torchmn import __version__
from torchmn.errors import require
from torchmn.observe.report.charts import Chart, run_charts, scaling_charts
from torchmn.observe.report.finding import Finding
from torchmn.observe.report.scaling import Scaling
from torchmn.observe.report.summary import Summary, duration
from torchmn.observe.report.tables import Table, placement_table, slow_steps_table


def plotly_script() -> str:
    """The text of plotly.js. Raises UnsupportedError: the package is not installed."""
    offline = require("plotly.offline", "The page (not --text or --json)", "torchmn[report]")
    return str(offline.get_plotlyjs())


def page(
    reports: Sequence[tuple[Summary, Sequence[Finding]]], scaling: Scaling | None, *, script: str
) -> str:
    """The whole page. ``script`` is that of `plotly_script`."""
    body = _Body()
    body.add("<header><h1>torchmn report</h1>")
    made = time.strftime("%Y-%m-%d %H:%M")
    body.add(f"<p class='muted'>made {made} by torchmn {escape(__version__)}</p></header><main>")
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
    charts = json.dumps(body.plots, allow_nan=False).replace("<", "\\u003c")
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<link rel='icon' href='data:,'>"
        f"<title>torchmn report: {escape(', '.join(_name(s) for s, _ in reports))}</title>"
        f"<style>{STYLE}</style></head><body>{''.join(body.parts)}"
        f"<script>{script}</script>"
        f"<script type='application/json' id='charts'>{charts}</script>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


class _Body:
    """Parts of the body, and the charts that are drawn into it."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.plots: list[dict[str, object]] = []

    def add(self, html: str) -> None:
        self.parts.append(html)

    def charts(self, charts: Sequence[Chart], *, has_one_table: bool = False) -> None:
        self.add("<div class='grid'>")
        for chart in charts:
            number = len(self.plots)
            size = "small" if chart.is_small else "wide"
            self.add(
                f"<figure class='{size}'><figcaption>{escape(chart.title)}</figcaption>"
                f"<div class='chart' id='chart{number}' role='img' style='height:{chart.height}px' "
                f"aria-label='{escape(chart.description, quote=True)}'></div>"
            )
            if not has_one_table:
                self.table(chart.table, chart.title)
            self.add("</figure>")
            self.plots.append(
                {"traces": list(chart.traces), "layout": chart.layout, "height": chart.height}
            )
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


def _add_charts(body: _Body, summary: Summary) -> None:
    body.add("<h3>Where the time goes</h3>")
    body.charts(list(run_charts(summary)))
    slow = slow_steps_table(summary)
    if slow.rows:
        body.add("<h3>The slowest steps</h3>")
        body.table(slow, "the slowest steps", is_open=True)
    body.add("<h3>Settings and placement</h3>")
    both = {**summary.ranks[0].settings, **summary.ranks[0].start.versions}
    body.table(Table(columns=("what", "value"), rows=list(both.items())), "settings and versions")
    body.table(placement_table(summary), "placement of ranks")


def _name(summary: Summary) -> str:
    folder = summary.run.folder.resolve()
    return folder.parent.name if folder.name == "steps" else folder.name


STYLE = """
:root{--ink:#1d2733;--muted:#5b6672;--line:#d9dee4;--card:#fff;--back:#f4f6f8;--fault:#b3261e;
--cost:#8a5a00}
*{box-sizing:border-box}
body{margin:0;font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:var(--ink);
background:var(--back)}
header,main{max-width:1180px;margin:0 auto;padding:0 16px}
h1{font-size:1.5rem;margin:20px 0 0}h2{font-size:1.25rem;margin:28px 0 8px;overflow-wrap:anywhere}
h3{font-size:1.05rem;margin:20px 0 8px}
.muted{color:var(--muted);margin:0}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:8px;margin:0}
.facts div,figure,.findings li{background:var(--card);border:1px solid var(--line);
border-radius:8px}
.facts div{padding:8px 12px}dt{color:var(--muted);font-size:.8rem}
dd{margin:0;font-size:1.15rem;font-weight:600}
.findings{list-style:none;margin:0;padding:0;display:grid;gap:8px}
.findings li{display:flex;gap:16px;padding:12px;border-left:6px solid var(--cost)}
.findings li.fault{border-left-color:var(--fault)}
.findings p{margin:0;overflow-wrap:anywhere}.share{font-size:1.5rem;font-weight:700;flex:0 0 84px}
.share span{display:block;font-size:.75rem;font-weight:400;color:var(--muted)}
.cure{color:var(--muted)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(340px,100%),1fr));gap:12px;
margin:12px 0}
figure{margin:0;padding:10px;min-width:0}.wide{grid-column:1/-1}
figcaption{font-weight:600}
.chart{width:100%;overflow:hidden}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:3px 10px 3px 0;text-align:left;border-bottom:1px solid var(--line);
white-space:nowrap}tbody th{font-weight:400}
summary{cursor:pointer;color:var(--muted);font-size:.85rem}
.hidden{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.notes{margin:0;padding-left:20px}
@media (max-width:520px){.findings li{flex-direction:column;gap:4px}
.share{flex:none}.share span{display:inline}}
@media print{body{background:#fff;font-size:11px}figure,.findings li,tr{break-inside:avoid}
.scroll{overflow:visible}h2,h3{break-after:avoid}
table{font-size:.75rem}th,td{white-space:normal}}
"""

SCRIPT = """
(function () {
  const plots = JSON.parse(document.getElementById('charts').textContent);
  const divs = plots.map((_, number) => document.getElementById('chart' + number));
  const font = {family: 'system-ui, sans-serif', size: 12, color: '#1d2733'};
  function layoutOf(plot) {
    const layout = Object.assign({
      font: font, height: plot.height, autosize: true,
      paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
      margin: {l: 52, r: 12, t: plot.layout.updatemenus ? 44 : 12, b: 44},
      legend: {orientation: 'h', traceorder: 'normal', yanchor: 'top',
        y: -56 / (plot.height - 100)},
    }, plot.layout);
    layout.xaxis = Object.assign({gridcolor: '#e6eaee', zeroline: false}, layout.xaxis);
    layout.yaxis = Object.assign({gridcolor: '#e6eaee', zeroline: false}, layout.yaxis);
    return layout;
  }
  const drawn = plots.map((plot, number) => Plotly.newPlot(divs[number], plot.traces,
    layoutOf(plot), {responsive: true, displayModeBar: false}));
  Promise.all(drawn).then(() => { document.documentElement.dataset.drawn = drawn.length; });
  let opened = [];
  window.addEventListener('beforeprint', () => {
    opened = Array.from(document.querySelectorAll('details:not([open])'));
    opened.forEach((each) => { each.open = true; });
    divs.forEach((div) => Plotly.relayout(div, {width: Math.min(div.clientWidth, 660)}));
  });
  window.addEventListener('afterprint', () => {
    opened.forEach((each) => { each.open = false; });
    divs.forEach((div) => Plotly.relayout(div, {width: null, autosize: true}));
  });
})();
"""
