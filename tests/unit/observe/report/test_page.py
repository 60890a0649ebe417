"""The page: one small file without anything from elsewhere, and what its charts show."""

import re
from pathlib import Path

import pytest

from tests.unit.recorded_runs import ImitatedRun
from torchmn.observe.read.run_reader import read_run
from torchmn.observe.report.charts import Chart, run_charts, shade
from torchmn.observe.report.comparison import compare
from torchmn.observe.report.drawing import UNITS, axis_of, axis_of_names
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
    return [chart for summary in summaries for chart in run_charts(summary)]


def test_it_is_complete_and_refers_to_nothing_else(summaries: list[Summary]) -> None:
    text = page([(summary, find(summary)) for summary in summaries], scaling_of(summaries), None)
    assert re.findall(r"""\b(?:src|href)=["']?([^"'>]*)""", text) == ["data:,"]
    num_charts = text.count("class='chart'")
    assert num_charts > 8
    assert len(re.findall(r"<div class='chart' role='img' aria-label='[^']", text)) == num_charts
    assert text.count("<table>") > num_charts
    for shown in ("Rank 3 (host host3) computes", "<td>host3</td>", "host0 to host1", "Amdahl"):
        assert shown in text
    assert re.search(r"<td>process</td><td>0\.50 GB</td><td>0\.56 GB</td>", text)  # of memory


def test_names_are_escaped(tmp_path: Path) -> None:
    settings = {"codec": "</script><script>alert(1)</script>", "model": "<b>&'\""}
    summary = summary_of(ImitatedRun(settings=settings), tmp_path / "<i>x")
    text = page([(summary, [])], None, None)
    assert "alert(1)</script>" not in text
    assert "<b>" not in text
    assert "<i>x" not in text
    assert text.count("<script") == 1


def test_it_is_valid_html(summaries: list[Summary]) -> None:
    html5lib = pytest.importorskip("html5lib", reason="no html5lib: install it with 'make setup'")
    found = compare(summaries[1], summaries[1])
    text = page([(summary, find(summary)) for summary in summaries], scaling_of(summaries), found)
    html5lib.HTMLParser(strict=True).parse(text)


def test_marks_are_within_their_plots(charts: list[Chart]) -> None:
    """All coordinates are from 0 to 1000; relative ones follow a letter."""
    for chart in charts:
        for number in re.findall(r"(?:M|z | )(-?\d+) (-?\d+)", chart.drawing):
            assert all(0 <= int(each) <= UNITS for each in number), chart.title
        assert not re.search(r"nan|inf\b", chart.drawing, re.IGNORECASE), chart.title


def test_tables_are_rectangular(charts: list[Chart]) -> None:
    for chart in charts:
        assert chart.table.rows, chart.title
        assert {len(row) for row in chart.table.rows} == {len(chart.table.columns)}, chart.title


def test_charts_show_the_late_rank(summaries: list[Summary]) -> None:
    by_title = {chart.title: chart for chart in run_charts(summaries[0])}
    late = by_title["Which rank is late, and when"]
    assert late.table.rows[0][0] == "3"
    means = [float(ms) for ms in re.findall(r"([-.\d]+) ms late on average", late.drawing)]
    assert len(means) == 4
    assert means[3] > 15 > max(map(abs, means[:3]))
    assert shade(1.0) in late.drawing.rpartition("<g class='cells'")[2]
    bars = by_title["Where the time of a step goes, by rank"].drawing
    backward = [float(ms) for ms in re.findall(r"rank \d: backward ([.\d]+) ms", bars)]
    assert len(backward) == 4
    assert backward[3] == max(backward)
    over_time = by_title["Where the time of a step goes, over the run"].drawing
    assert len(re.findall(r"<title>step \d+: ", over_time)) == 60


def test_peaks_are_where_they_were_and_equally_high(tmp_path: Path) -> None:
    """There are more steps than places: two share one, in the whole run."""
    peaks = dict.fromkeys((20, 100, 161), (0, "other", 0.2))
    run = ImitatedRun(num_ranks=2, num_steps=184, slow_steps=peaks, jitter=0.0)
    summary = summary_of(run, tmp_path)
    by_title = {chart.title: chart.drawing for chart in run_charts(summary)}
    over_time = by_title["Where the time of a step goes, over the run"]
    heights = {
        int(step): float(ms)
        for step, ms in re.findall(r"<title>step (\d+):[^<]*other ([.\d]+) ms", over_time)
    }
    high = {step: ms for step, ms in heights.items() if ms > 10}
    assert list(high) == [20, 100, 160]
    assert max(high.values()) == pytest.approx(min(high.values()), rel=0.05)
    late = by_title["Which rank is late, and when"].partition(f"<path fill='{shade(1.0)}'")[2]
    cells = re.findall(r"M(\d+) 0h(\d+)", late.partition("/>")[0])
    assert [round(int(begin) * 184 / UNITS) for begin, _ in cells] == [20, 100, 160]
    assert all(int(width) * 184 / UNITS == pytest.approx(2, abs=0.2) for _, width in cells)


def test_many_ranks_and_steps_make_a_small_page(tmp_path: Path) -> None:
    imitated = ImitatedRun(num_ranks=200, ranks_per_host=2, num_steps=300, bucket_nbytes=(1000,))
    summary = summary_of(imitated, tmp_path)
    text = page([(summary, find(summary))], None, None)
    assert len(text.encode()) < 200_000
    assert not re.search(r"\bnan\b|\binf\b|NaN|Infinity", text)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.0, 1.0], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([3.0, 3.0], ["2.8", "3.0", "3.2"]),
        ([0.0], ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
        ([12_000, 31_000], ["15,000", "20,000", "25,000", "30,000"]),
        # steps of a run that continues another one
        ([10_000_000, 10_000_900], [f"10,000,{step}00" for step in (0, 2, 4, 6, 8)]),
        ([float("nan")], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([1e-7, 4e-7], ["0.0000001", "0.0000002", "0.0000003", "0.0000004"]),
    ],
)
def test_ticks_are_round_numbers(values: list[float], ticks: list[str]) -> None:
    assert [text for _, text in axis_of(values).ticks] == ticks


def test_few_names_stand_below_many_bars() -> None:
    axis = axis_of_names([str(number) for number in range(48)])
    assert 4 <= len(axis.ticks) <= 12
    assert axis.ticks[0] == (0.5, "0")
    assert len(axis_of_names([f"node{number:04d}.cluster" for number in range(9)]).ticks) <= 3
