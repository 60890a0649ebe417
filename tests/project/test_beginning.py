"""One way to begin: the same seven lines wherever a reader begins, and the script that they make.

Also the first page: its doors, its gallery and its pictures; the badges of the README; and the
words for which the search of the site shows a page first.
"""

import ast
import difflib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import make_site

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PLAIN = ROOT / "examples" / "plain" / "train.py"
PORTED = PLAIN.with_name("train_multi_node.py")
FIRST_TRAINING = DOCS / "how-to" / "first-training.md"
JAPANESE = DOCS / "ja" / "how-to" / "first-training.md"
BEGINNINGS = [
    ROOT / "README.md",
    DOCS / "index.md",
    FIRST_TRAINING,
    JAPANESE,
    DOCS / "how-to" / "start.md",
]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_of(path: Path) -> list[str]:
    """The lines of a script after its docstring."""
    text = path.read_text()
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


def changes() -> Iterator[tuple[str, str]]:
    """The lines of both scripts with the mark that a diff gives them, without indentation."""
    for line in difflib.ndiff(code_of(PLAIN), code_of(PORTED)):
        if line[2:].strip() and line[0] in " +-":
            yield line[0], line[2:].strip()


def diff_of(page: Path) -> str:
    (found,) = re.findall(r"```diff\n(.*?)```", page.read_text(), re.DOTALL)
    return str(found)


def test_seven_lines_differ() -> None:
    added = [line for mark, line in changes() if mark == "+"]
    assert len(added) == 7, "\n".join(added)


@pytest.mark.parametrize("page", BEGINNINGS, ids=name_of)
def test_every_beginning_shows_the_difference_of_both_scripts(page: Path) -> None:
    """All lines that come and go, in order; between them lines that stay."""
    shown = [(line[0], line[1:].strip()) for line in diff_of(page).splitlines()]
    script = list(changes())
    for mark in "+-":
        assert [each for each in shown if each[0] == mark] == [e for e in script if e[0] == mark]
    stay = iter(line for mark, line in script if mark == " ")
    assert all(line in stay for mark, line in shown if mark == " ")


def test_the_difference_is_the_same_text_everywhere() -> None:
    assert len({diff_of(page) for page in BEGINNINGS}) == 1


@pytest.mark.parametrize("page", BEGINNINGS, ids=name_of)
def test_every_beginning_counts_seven_lines(page: Path) -> None:
    text = page.read_text()
    assert ("7行" if page == JAPANESE else "even lines") in text
    number = "one|two|three|four|five|six|eight|nine"
    assert not re.search(rf"\b(?:{number}) (?:changed |numbered |new )?lines", text, re.IGNORECASE)


@pytest.mark.parametrize("page", [FIRST_TRAINING, JAPANESE], ids=name_of)
def test_the_first_training_is_the_example(page: Path) -> None:
    (script,) = re.findall(r'```python title="train.py"\n(.*?)```', page.read_text(), re.DOTALL)
    assert script.strip() == "\n".join(code_of(PORTED)).strip()


def test_the_tutorial_begins_with_it() -> None:
    (tutorial,) = [each for each in make_site.SECTIONS if each.folder == "tutorial"]
    assert tutorial.pages[0] == "how-to/first-training"
    links = re.findall(r"\]\(([^)]+)\)", (DOCS / "tutorial" / "index.md").read_text())
    assert links[0] == "../how-to/first-training.md"


# ------------------------------------------------------------------------------- the first page


def section(title: str) -> str:
    text = (DOCS / "index.md").read_text()
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_five_doors() -> None:
    assert len(re.findall(r"^- \*\*\[", section("Where to begin"), re.MULTILINE)) == 5


def test_the_gallery_has_all_examples_with_a_picture_each() -> None:
    gallery = section("Examples")
    entries = re.findall(r"^- \[!\[[^\]]+\]\(([^)]+)\)\]\(([^)]+)\)$", gallery, re.MULTILINE)
    assert len(entries) == len(re.findall("^- ", gallery, re.MULTILINE)) >= 12
    pictures = [DOCS / picture for picture, _ in entries]
    assert len({*pictures}) == len(pictures)
    assert {*pictures} == {*(DOCS / "figures" / "gallery").iterdir()}
    shown = {Path(target).parent.name for target in re.findall(r"\]\(([^)]+\.py)\)", gallery)}
    have_scripts = {path.parent.name for path in (ROOT / "examples").glob("*/*train*.py")}
    assert have_scripts <= shown


def test_the_pictures_of_the_first_page_are_light() -> None:
    names = re.findall(r"\((figures/[^)]+)\)", (DOCS / "index.md").read_text())
    sizes = {name: (DOCS / name).stat().st_size for name in names}
    assert max(sizes.values()) < 60_000, sizes
    assert sum(sizes.values()) < 400_000


def test_the_readme_has_the_same_figure() -> None:
    figure = re.compile(r"^!\[[^\]]+\]\(figures/\w+\.png\)\n\n\*(?:.+\n)+", re.MULTILINE)
    own, first = (
        figure.findall(page.read_text().replace("(docs/", "("))
        for page in (ROOT / "README.md", DOCS / "index.md")
    )
    assert own == first
    assert len(own) == 1


def test_the_badges_are_true() -> None:
    """They say what pyproject.toml does; there is none for what nothing here can know."""
    make_gallery = pytest.importorskip(
        "scripts.make_gallery", reason="no matplotlib or scikit-learn: 'make setup'"
    )
    badge = r"!\[([^\]]+)\]\(docs/figures/badges/(\w+)\.svg\)"
    shown = re.findall(badge, (ROOT / "README.md").read_text())
    facts = make_gallery.badges()
    assert [name for _, name in shown] == list(facts)
    for alternative, name in shown:
        assert facts[name][1] in alternative
        svg = (DOCS / "figures" / "badges" / f"{name}.svg").read_text()
        assert svg == make_gallery.badge(*facts[name])


# ------------------------------------------------------------------------------------- the search

FIRST = {
    "gradient accumulation": "how-to/gradient-accumulation",
    "learning rate": "how-to/large-batch",
    "checkpoint": "how-to/checkpoints",
    "hang": "how-to/failures",
    "DDP": "coming-from-ddp",
    "install": "how-to/install",
}


def entries() -> list[tuple[str, str]]:
    """What pages are to be found by, in small letters, and the page."""
    return [
        (word.lower(), path.relative_to(DOCS).with_suffix("").as_posix())
        for path in sorted(DOCS.rglob("*.md"))
        for line in path.read_text().splitlines()
        for word in make_site.searched_words(line)
    ]


def test_a_word_of_the_search_belongs_to_one_page() -> None:
    """Sphinx scores an entry of the index that is the query at 100, and a title at 16 at most.

    So this rule decides what comes first; `test_the_search_shows_the_page_first` asks the search.
    """
    words = [word for word, _ in entries()]
    assert len(words) == len({*words})
    found = dict(entries())
    assert {query: found.get(query.lower()) for query in FIRST} == FIRST


SEARCH = """
const fs = require("fs"), vm = require("vm"), [folder, ...queries] = process.argv.slice(1);
const element = {childNodes: []};
const context = vm.createContext({
  document: {getElementById: () => element, querySelectorAll: () => []}, console,
  localStorage: {setItem: () => null}, SPHINX_HIGHLIGHT_ENABLED: false, _: (text) => text,
  _ready: () => null, DOCUMENTATION_OPTIONS: {},
});
context.window = context;
for (const name of ["_static/language_data.js", "_static/searchtools.js"])
  vm.runInContext(fs.readFileSync(`${folder}/${name}`, "utf8"), context);
context.index = fs.readFileSync(`${folder}/searchindex.js`, "utf8");
context.queries = queries;
console.log(vm.runInContext(`
  eval(index);
  // it shows the results from the last one on
  JSON.stringify(queries.map((query) => Search._performSearch(...Search._parseQuery(query))
    .slice(-3).reverse().map((one) => one[0])
  ))`, context));
"""


def found_by_the_search(site: Path, queries: list[str]) -> dict[str, list[str]]:
    """The first three pages that the search of a built site shows, by Sphinx's own code."""
    node = shutil.which("node")
    if node is None:
        pytest.skip(reason="no node (Debian: nodejs), which runs the search as a browser does")
    command = [node, "-e", SEARCH, str(site), *queries]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(queries, json.loads(done.stdout), strict=True))
