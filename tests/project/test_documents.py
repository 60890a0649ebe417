"""Links and file names in the documents lead somewhere; no path of one machine is in the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    broken = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert broken == []


def test_where_is_table_names_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`((?:src|tests|examples|benchmarks|docs|scripts)/[\w/.-]+)`", text)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_five_lines_of_the_readme_are_real_names() -> None:
    import torchmn

    called = set(re.findall(r"torchmn\.(\w+)\(", (ROOT / "README.md").read_text()))
    assert called
    assert called <= set(torchmn.__all__)
