"""The page of ``torchmn report`` in a real browser: drawn, on small screens, printed, named."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.test_main import run
from tests.unit.recorded_runs import ImitatedRun

from .browser import Browser, browser

pytestmark = pytest.mark.processes

DRAWN = """
return [...document.querySelectorAll('.chart')].map((chart) => [
  chart.getAttribute('aria-label'),
  [...chart.querySelectorAll('svg rect, svg path:not(.grid)')].filter((mark) => {
    const box = mark.getBoundingClientRect();
    return box.width + box.height > 1;
  }).length]);
"""
# Texts of axes and legends that cover each other, in pixels of the screen.
COVERED = """
return [...document.querySelectorAll('.chart')].flatMap((chart) => {
  const boxes = [...chart.querySelectorAll('.plot span, .legend > span')].filter(
    (each) => each.textContent).map((each) => [each.textContent, each.getBoundingClientRect()]);
  return boxes.flatMap(([text, one], index) => boxes.slice(index + 1).filter(([, other]) =>
    one.left < other.right - 1 && other.left < one.right - 1 &&
    one.top < other.bottom - 4 && other.top < one.bottom - 4).map(([other]) => [text, other]));
});
"""


@pytest.fixture
def window(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of healthy runs on one and two ranks, and of one with a late rank on four."""
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


def test_charts_are_drawn_without_a_complaint(window: Browser, page: Path) -> None:
    """On a telephone and on a screen, without anything from the network."""
    for width in (400, 1280):
        window.open(page, width=width)
        charts = window.run(DRAWN)
        assert len(charts) == 11
        assert [name for name, marks in charts if not marks] == []
        assert window.console() == []
        # nothing is wider than the screen, but for tables that scroll by themselves
        assert window.run("return document.documentElement.scrollWidth") <= width
        ends = window.run(
            "return [...document.querySelectorAll('.chart span, .chart svg')].map("
            "(each) => each.getBoundingClientRect().right)"
        )
        assert max(ends) <= width
        assert window.run(COVERED) == []
    loaded = window.run("return performance.getEntriesByType('resource').map((each) => each.name)")
    assert [name for name in loaded if not name.startswith(("data:", "blob:"))] == []


def test_a_screen_reader_finds_names_and_tables(window: Browser, page: Path) -> None:
    window.open(page, width=800)
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
