"""The documentation site is built without a warning, and every public name has its place."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import make_site
from tests.project.test_beginning import FIRST, found_by_the_search

ROOT = Path(__file__).parents[2]
MISSING = [
    n
    for n in ("sphinx", "myst_parser", "furo", "sphinx_copybutton")
    if importlib.util.find_spec(n) is None
]
MARKS = [
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}: install the extra docs, or 'make setup'"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new site, built as `make docs` does it."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, str(ROOT / "scripts" / "make_site.py"), "--output", str(folder)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    done = subprocess.run(command, cwd=folder.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class TestSite:
    pytestmark = MARKS

    def test_every_public_name_has_an_anchor(self, site: Path) -> None:
        missing = []
        for module, names in make_site.public_names().items():
            page = make_site.Page(site / "reference" / "api" / f"{module}.html")
            missing += [f"{module}.{n}" for n in names if f"{module}.{n}" not in page.anchors]
        assert missing == []

    def test_every_document_is_on_the_site(self, site: Path) -> None:
        places = [
            make_site.place_of(path.relative_to(ROOT).as_posix()) or ""
            for path in (ROOT / "docs").rglob("*.md")
        ]
        assert [p for p in places if not (site / p).with_suffix(".html").exists()] == []

    def test_the_search_finds_names_without_a_network(self, site: Path) -> None:
        index = (site / "searchindex.js").read_text()
        assert "create_communicator" in index
        assert list(make_site.faults_of(site)) == []  # nothing is loaded from elsewhere, too

    def test_the_search_shows_the_page_first(self, site: Path) -> None:
        found = found_by_the_search(site, list(FIRST))
        assert {query: pages[0] for query, pages in found.items()} == FIRST

    def test_blocks_of_code_can_be_copied_and_pages_have_an_address(self, site: Path) -> None:
        page = (site / "index.html").read_text()
        assert "_static/copybutton.js" in page
        assert f'rel="canonical" href="{make_site.address()}index.html"' in page


FAULTS = {
    '<a href="other.html">': "other.html does not exist",
    '<a href="#nowhere">': "#nowhere has no such anchor",
    '<a href="second.html#nowhere">': "second.html#nowhere has no such anchor",
    '<script src="https://example.org/x.js"></script>': "loads https://example.org/x.js",
    '<link rel="stylesheet" href="//example.org/font.css">': "loads //example.org/font.css",
    "<p>" + "x" * make_site.MAX_PAGE_BYTES: "bytes, at most",
}


@pytest.mark.parametrize("html", FAULTS, ids=FAULTS.values())
def test_faults_are_found(tmp_path: Path, html: str) -> None:
    (tmp_path / "first.html").write_text('<p id="here"><a href="second.html#there">' + html)
    (tmp_path / "second.html").write_text('<p id="there"><a href="first.html#here">')
    (fault,) = make_site.faults_of(tmp_path)
    assert FAULTS[html] in fault


def test_links_lead_to_places_on_the_site() -> None:
    files: list[str] = []

    def link_to_file(file: str) -> str:
        files.append(file)
        return f"files/{file}.md"

    text = "\n".join(
        [
            "[a](../security.md#ports) [b](../../ARCHITECTURE.md) [c](names.md) [d](#here)",
            "[i](schemas/report.json) "
            "[e](../../src/torchmn/errors.py) [f](https://example.org/a.md) [g](no-such.md)",
            "```",
            "[h](../security.md)",
            "```",
        ]
    )
    assert make_site.site_text(text, "docs/reference/data.md", link_to_file).splitlines() == [
        "[a](../security.md#ports) [b](../project/architecture.md) [c](api/index.rst) [d](#here)",
        "[i](../files/docs/reference/schemas/report.json.md) "
        "[e](../files/src/torchmn/errors.py.md) [f](https://example.org/a.md) [g](no-such.md)",
        "```",
        "[h](../security.md)",
        "```",
    ]
    assert files == ["docs/reference/schemas/report.json", "src/torchmn/errors.py"]


def test_titles_of_code_are_captions() -> None:
    text = make_site.site_text('```python title="train.py"\npass\n```\n', "docs/index.md", str)
    assert text == "```{code-block} python\n:caption: train.py\n\npass\n```\n"


def test_words_of_the_search_are_entries_of_the_index() -> None:
    text = make_site.site_text("# Title\n<!-- search: hang, time limit -->\n", "docs/a.md", str)
    assert text == "# Title\n\n```{index} ! hang, ! time limit\n```\n\n"


def test_steps_are_in_order() -> None:
    assert sorted(["10-x", "2-b", "from", "1-a"], key=make_site.natural) == [
        "1-a",
        "2-b",
        "10-x",
        "from",
    ]
