"""One version, CHANGELOG.md in its form, and nothing deprecated stays longer than announced."""

import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from torchmn import __version__

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "docs" / "project" / "deprecation.md"
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
MINORS_BETWEEN = 2  # how many minor releases there are at least from ``since`` to ``removed_in``


class Deprecated(NamedTuple):
    name: str
    since: str
    removed_in: str
    instead: str


def deprecated(page: str) -> list[Deprecated]:
    """The rows of the table on this page."""
    table = page.partition("| name | since | removed_in | instead |\n|---|---|---|---|\n")
    assert table[1], "the table of deprecations has another head"
    rows = itertools.takewhile(lambda line: line.startswith("|"), table[2].splitlines())
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    return [Deprecated(*row) for row in cells]


def overdue(rows: list[Deprecated], version: str) -> list[str]:
    """What had to be gone in this version."""
    return [row.name for row in rows if _parts(row.removed_in) <= _parts(version)]


def too_early(rows: list[Deprecated]) -> list[str]:
    """What would go sooner than the policy allows."""
    return [
        row.name
        for row in rows
        if _parts(row.removed_in)[:1] == _parts(row.since)[:1]
        and _parts(row.removed_in)[1] < _parts(row.since)[1] + MINORS_BETWEEN
    ]


def _parts(version: str) -> tuple[int, ...]:
    numbers = [int(number) for number in version.split(".")]
    return tuple(numbers + [0] * (3 - len(numbers)))


def _releases() -> list[tuple[str, str]]:
    """Versions and the text below each, the newest first; "" for what is not released."""
    text = (ROOT / "CHANGELOG.md").read_text()
    heads = list(re.finditer(r"^## (.*)$", text, re.MULTILINE))
    found = []
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        match = re.fullmatch(r"\[(Unreleased|\d+\.\d+\.\d+)\](?: - \d{4}-\d\d-\d\d)?", head[1])
        assert match, f"'## {head[1]}' is neither '## [Unreleased]' nor '## [1.2.3] - 2026-01-31'"
        is_dated = head[1].endswith("]") is False
        assert is_dated == (match[1] != "Unreleased"), head[1]
        end = following.start() if following else len(text)
        found.append((match[1].replace("Unreleased", ""), text[head.end() : end]))
    return found


def test_version_is_semantic() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", __version__)


def test_the_version_is_in_one_place() -> None:
    """Builds read it from the package."""
    assert re.search(r'^version = "', (ROOT / "pyproject.toml").read_text(), re.MULTILINE) is None


def test_changelog() -> None:
    releases = _releases()
    assert releases[0][0] == "", "the first section is '## [Unreleased]'"
    versions = [_parts(version) for version, _ in releases[1:]]
    assert versions == sorted(set(versions), reverse=True)
    assert all(version <= _parts(__version__) for version in versions)
    # The first release lists what there is by subject; later ones what has changed, by kind.
    later = releases if not versions else releases[:-1]
    if versions:
        heads = {
            head for _, text in later for head in re.findall(r"^### (.*)$", text, re.MULTILINE)
        }
        assert heads <= KINDS


def test_nothing_deprecated_is_overdue() -> None:
    rows = deprecated(POLICY.read_text())
    assert overdue(rows, __version__) == []
    assert too_early(rows) == []


def test_overdue_is_found() -> None:
    page = (
        "| name | since | removed_in | instead |\n|---|---|---|---|\n"
        "| `torchmn.old` | 0.3 | 0.5 | `torchmn.new` |\n"
        "| `--older` | 0.9 | 1.0 | `--newer` |\n"
        "| `hasty` | 0.3 | 0.4.0 | nothing |\n\nText.\n"
    )
    rows = deprecated(page)
    assert [row.name for row in rows] == ["`torchmn.old`", "`--older`", "`hasty`"]
    assert overdue(rows, "0.4.9") == ["`hasty`"]
    assert overdue(rows, "0.5.0") == ["`torchmn.old`", "`hasty`"]
    assert overdue(rows, "1.0.0") == ["`torchmn.old`", "`--older`", "`hasty`"]
    assert too_early(rows) == ["`hasty`"]


def _read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_citation() -> None:
    """What the format 1.2.0 requires, and our version."""
    found = _read("CITATION.cff")
    assert found["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(found)
    assert all("name" in each or "family-names" in each for each in found["authors"])
    assert found["version"] == __version__
    assert found["license"] == "MIT"
    for each in found["references"]:
        assert {"type", "title", "authors"} <= set(each)
