"""docs/reference/environment.md lists the environment variables of the sources, and only those."""

import re
from collections.abc import Iterable
from pathlib import Path

from torchmn.cluster import environment_variables

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "torchmn"
PAGE = ROOT / "docs" / "reference" / "environment.md"
NAME = re.compile(r"\bTORCHMN_[A-Z][A-Z0-9_]*")
CONSTANTS = {
    value
    for name, value in vars(environment_variables).items()
    if name.endswith("_VARIABLE") and isinstance(value, str)
}


def names_in(paths: Iterable[Path]) -> set[str]:
    return {name for path in paths for name in NAME.findall(path.read_text())}


def test_every_variable_of_the_sources_is_in_the_table_and_the_reverse() -> None:
    table = set(re.findall(r"^\| `(TORCHMN_[A-Z0-9_]+)` \|", PAGE.read_text(), re.MULTILINE))
    assert table == names_in(SOURCES.rglob("*.py")) == CONSTANTS


def test_docs_name_only_variables_that_exist() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    names = names_in(page for page in pages if page.name != "CHANGELOG.md")
    assert {name for name in names if not name.startswith("TORCHMN_TEST_")} <= CONSTANTS


DEFINED_IN = {"environment_variables.py", "log.py"}
"""Of the second, which is below it, the first imports the constant."""


def test_code_uses_the_constants() -> None:
    """A literal of its own would be a second place to change."""
    literal = re.compile(r"""["']TORCHMN_[A-Z0-9_]+["']""")
    found = [
        f"{path.relative_to(ROOT)}: {match}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path.name not in DEFINED_IN
        for match in literal.findall(path.read_text())
        if match.strip("\"'") != "TORCHMN_"
    ]
    assert found == []
