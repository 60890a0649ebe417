"""Links and file names in the documents lead somewhere; no path of one machine is in the tree."""

import ast
import re
import textwrap
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import torchmn

from .names import INTERNAL
from .source import parsed

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
LAZY = {*torchmn.__all__, *torchmn._SUBMODULES}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    broken = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert broken == []


def test_architecture_names_files_that_exist() -> None:
    """From the root, or from ``src/torchmn``; a folder alone may be in any wing."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`([\w/.-]+(?:/|\.py))`", text))
    source = ROOT / "src" / "torchmn"
    is_there = {
        name: (ROOT / name).exists() or any((*source.glob(name), *source.glob(f"*/{name}")))
        for name in named
    }
    assert len(named) > 50
    assert [name for name, is_one in is_there.items() if not is_one] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_documented_names_exist(page: Path) -> None:
    """As after a plain ``import torchmn``: by attribute, without another import before."""
    names = re.findall(r"(?<!-m )\btorchmn((?:\.[A-Za-z]\w*)+)", page.read_text())
    names = [name for name in names if name != ".toml"]  # a site's file
    assert [name for name in sorted(set(names)) if not _resolves(name[1:].split("."))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_in_documents_is_python_and_imports_what_it_uses(page: Path) -> None:
    """A public name of ours without a prefix was imported earlier on the page."""
    imported: set[str] = set()
    missing = []
    for block in re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(), re.DOTALL):
        tree = ast.parse(textwrap.dedent(block))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchmn"):
                module = import_module(str(node.module))
                missing += [a.name for a in node.names if not hasattr(module, a.name)]
                imported |= {a.asname or a.name for a in node.names}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        missing += sorted((used & _public_names()) - imported)
    assert missing == []


def _resolves(path: list[str]) -> bool:
    if path[0] in {*INTERNAL, "exchange"}:  # a module that the page explains, not a name to use
        return find_spec(".".join(["torchmn", *path])) is not None
    # Not by getattr at first: other tests have imported the submodules already.
    try:
        value = torchmn.__getattr__(path[0]) if path[0] in LAZY else getattr(torchmn, path[0])
        for name in path[1:]:
            value = getattr(value, name)
    except AttributeError:
        return False
    return True


def _public_names() -> set[str]:
    """All but CNTK's, which pages write as ``C.sgd`` and which are users' variables, too."""
    names = sorted(torchmn._SUBMODULES.keys() - {"cntk"})
    modules = [import_module(torchmn._SUBMODULES[name]) for name in names]
    return {name for m in modules for name in getattr(m, "__all__", [])} | set(torchmn.__all__)


def test_the_messages_of_the_page_exist() -> None:
    """Each message is a part of a text in the source, ``...`` for what is filled in."""
    constants = {
        node.value
        for tree in parsed().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    texts = "\n".join(constants)
    page = (ROOT / "docs" / "reference" / "messages.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) >= 30
    parts = [part.strip() for message in quoted for part in re.split(r"(?<= )\.\.\.", message)]
    assert [part for part in parts if part not in texts] == []


def test_terms_of_the_glossary_have_one_line_each() -> None:
    terms = re.findall(
        r"^\| ([a-z][^|]*) \| [A-Z].*\.(?: |`|$)",
        (ROOT / "docs" / "glossary.md").read_text(),
        re.MULTILINE,
    )
    assert len(terms) == len(set(terms)) > 50
