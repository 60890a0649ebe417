"""The page: one file without anything from elsewhere, whose charts plotly accepts."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.unit.recorded_runs import ImitatedRun
from torchmn.observe.read.run_reader import read_run
from torchmn.observe.report.charts import Chart, run_charts, scaling_charts
from torchmn.observe.report.findings import find
from torchmn.observe.report.page import page
from torchmn.observe.report.summary import Summary, summarize
from torchmn.observe.report.tables import scaling_of


def summary_of(imitated: ImitatedRun, folder: Path) -> Summary:
    return summarize(read_run(imitated.write(folder)))


@pytest.fixture(scope="module")
def summaries(tmp_path_factory: pytest.TempPathFactory) -> list[Summary]:
    folder = tmp_path_factory.mktemp("runs")
    slow = ImitatedRun(num_ranks=4, slower={(3, "backward"): 1.5}, growth_nbytes=1_000_000)
    return [
        summary_of(slow, folder / "slow"),
        summary_of(ImitatedRun(num_ranks=2), folder / "two"),
        summary_of(ImitatedRun(num_ranks=1, num_steps=1), folder / "one"),
    ]


@pytest.fixture(scope="module")
def charts(summaries: list[Summary]) -> list[Chart]:
    own = [chart for summary in summaries for chart in run_charts(summary)]
    return [*scaling_charts(scaling_of(summaries)), *own]


class _Tags(HTMLParser):
    """Tags that are opened and closed in order, and what they refer to."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.charts: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        if ("class", "chart") in attrs:
            self.charts.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_it_is_complete_and_refers_to_nothing_else(summaries: list[Summary]) -> None:
    text = page(
        [(summary, find(summary)) for summary in summaries], scaling_of(summaries), script=""
    )
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.references == ["data:,"]
    assert len(tags.charts) > 10
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in tags.charts)
    assert text.count("<table>") >= len(tags.charts) - 2  # the three of scaling share one
    assert "Rank 3 (host host3) computes" in text


def test_names_are_escaped(tmp_path: Path) -> None:
    settings = {"codec": "</script><script>alert(1)</script>", "model": "<b>&'\""}
    summary = summary_of(ImitatedRun(settings=settings), tmp_path / "<i>x")
    text = page([(summary, [])], None, script="")
    assert "alert(1)</script>" not in text
    assert "<b>" not in text
    assert "<i>x" not in text
    assert text.count("<script") == 3


def test_plotly_accepts_every_chart(charts: list[Chart]) -> None:
    graph_objects = pytest.importorskip(
        "plotly.graph_objects", reason="no plotly: install it with 'make setup'"
    )
    for chart in charts:
        graph_objects.Figure({"data": list(chart.traces), "layout": chart.layout})


def test_tables_are_rectangular(charts: list[Chart]) -> None:
    for chart in charts:
        assert chart.table.rows, chart.title
        assert {len(row) for row in chart.table.rows} == {len(chart.table.columns)}, chart.title


def test_charts_show_the_late_rank(summaries: list[Summary]) -> None:
    by_title = {chart.title: chart for chart in run_charts(summaries[0])}
    late = by_title["Which rank is late, and when"]
    assert late.table.rows[0][0] == "3"
    (heatmap,) = late.traces
    rows = dict(zip(heatmap["y"], heatmap["z"], strict=True))
    assert min(rows["3"]) > 15
    assert max(map(abs, rows["0"] + rows["2"])) < 15
    bars = by_title["Where the time of a step goes, by rank"]
    backward = next(trace for trace in bars.traces if trace["name"] == "backward")
    assert backward["y"][3] == max(backward["y"])


def test_many_ranks_and_steps_make_a_small_page(tmp_path: Path) -> None:
    imitated = ImitatedRun(num_ranks=200, ranks_per_host=2, num_steps=300, bucket_nbytes=(1000,))
    summary = summary_of(imitated, tmp_path)
    text = page([(summary, find(summary))], None, script="")
    assert len(text) < 1_000_000
    assert not re.search(r"NaN|Infinity", text)
