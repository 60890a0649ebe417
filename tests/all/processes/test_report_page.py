"""The page of ``torchmn report`` in a real browser: drawn, on small screens, printed, named."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.limits import limit
from tests.unit.cli.test_main import run
from tests.unit.recorded_runs import ImitatedRun

from .browser import PATIENCE_S, Browser, browser

pytestmark = pytest.mark.processes

DRAWN = """
const charts = Array.from(document.querySelectorAll('.chart'));
return [Number(document.documentElement.dataset.drawn || 0), charts.map((chart) => [
  chart.getAttribute('aria-label'), chart.querySelectorAll(
    '.trace path, .trace .point path, .hm image, .points path, .js-line').length])];
"""


@pytest.fixture
def window(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of healthy runs on one and two ranks, and of one with a late rank on four."""
    pytest.importorskip("plotly", reason="no plotly: install it with 'make setup'")
    folder = tmp_path_factory.mktemp("runs")
    slow = ImitatedRun(num_ranks=4, slower={(3, "backward"): 1.5}, run_queue={3: 0.4})
    runs = [
        ImitatedRun(num_ranks=1).write(folder / "one"),
        ImitatedRun(num_ranks=2).write(folder / "two"),
        slow.write(folder / "slow"),
    ]
    done = run("-m", "torchmn", "report", *map(str, runs))
    assert done.returncode == 0, done.stderr
    return runs[0] / "report.html"


def wait_until_drawn(window: Browser) -> list[tuple[str, int]]:
    """The description of each chart and how many marks it has."""
    deadline = time.monotonic() + limit(PATIENCE_S)
    while True:
        count, charts = window.run(DRAWN)
        if count and count == len(charts):
            return [tuple(chart) for chart in charts]
        assert time.monotonic() < deadline, window.console()
        time.sleep(0.05)


def test_charts_are_drawn_without_a_complaint(window: Browser, page: Path) -> None:
    """On a telephone and on a screen, without anything from the network."""
    for width in (400, 1280):
        window.open(page, width=width)
        charts = wait_until_drawn(window)
        assert len(charts) > 12
        assert [name for name, marks in charts if not marks] == []
        assert window.console() == []
        # nothing is wider than the screen, but for tables that scroll by themselves
        assert window.run("return document.documentElement.scrollWidth") <= width
        ends = window.run(
            "return Array.from(document.querySelectorAll('.chart .main-svg')).map("
            "(svg) => svg.getBoundingClientRect().right)"
        )
        assert max(ends) <= width
    loaded = window.run("return performance.getEntriesByType('resource').map((each) => each.name)")
    assert [name for name in loaded if not name.startswith(("data:", "blob:"))] == []


def test_a_screen_reader_finds_names_and_tables(window: Browser, page: Path) -> None:
    window.open(page, width=800)
    wait_until_drawn(window)
    nodes = window._devtools("Accessibility.getFullAXTree", {})["nodes"]
    names = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if "role" in n]
    images = [name for role, name in names if role in ("img", "image")]
    assert sum("Mean milliseconds of each phase" in name for name in images) == 6
    headings = [name for role, name in names if role == "heading"]
    assert headings.count("What limits this run") == 3
    window.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    nodes = window._devtools("Accessibility.getFullAXTree", {})["nodes"]
    tables = [n for n in nodes if n.get("role", {}).get("value") == "table"]
    assert len(tables) > 12
    assert all(n["name"]["value"] for n in tables)
    assert sum(n.get("role", {}).get("value") == "columnheader" for n in nodes) > len(tables)
