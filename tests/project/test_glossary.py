"""Retired words stay retired; docs/glossary.md says what to write.

``python -m tests.project.test_glossary WORD`` shows where a word stands.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "glossary.md"
MADE = ("docs/reference/messages.md", "docs/reference/names.md")
LEFT_OUT = {PAGE, *(ROOT / name for name in MADE)}
"""The page itself, and those that a script makes from the source."""


class Retired(NamedTuple):
    pattern: str
    """Of a word, which may be a part of an identifier: letters around it make another word."""
    instead: str


RETIRED = {
    "behind (in time)": Retired("(?<!left )(?<!leave )(?<!leaves )(?<!far )behind", "after"),
    "go on": Retired("(go|goes|going|gone|went) on", "continue, resume"),
    "everybody": Retired("everybod(y|ies)", "all ranks, `gathered`"),
    "so many": Retired("(so|equally) many", "n, the same number of"),
    "alike": Retired("alike", "identically, the same"),
    "anew": Retired("anew", "again, from scratch"),
    "owe, owed": Retired("ow(e|es|ed|ing)", "residual, is pending"),
    "debt, settle": Retired("(debts?|settle[sd]?)", "residual, flush"),
    "he, his": Retired("(he|his|him|himself)", "it, they"),
    "verdict, judge": Retired("(verdicts?|judges?|judged)", "job result, summarize"),
    "culprit, guilty": Retired("(culprits?|guilty)", "first failure, failed rank"),
    "victim": Retired("victims?", "rank that was ended"),
    "blame": Retired("blame[sd]?", "cause"),
    "obituary": Retired("obituar(y|ies)", "exit report"),
    "stranger, visitor": Retired("(strangers?|visitors?)", "unauthenticated client, peer"),
    "knock": Retired("knock(s|ed|ing)?", "connect"),
    "door, gate": Retired("(doors?|gates?)", "listener"),
    "cargo, freight": Retired("(cargos?|freights?)", "buffer, block"),
    "parcel": Retired("parcels?", "chunk, message"),
    "journal": Retired("journals?", "flight recorder"),
    "gone astray": Retired("astray", "diverged"),
    "residue": Retired("residues?", "residual"),
    "speaker": Retired("speakers?", "rank label"),
    "no more": Retired(r"no more(?! (than|[a-z]+s)\b)", "no longer"),
    "told, said": Retired("(told|said|hears?|heard)", "message, reply, report"),
    "who does not come": Retired("who (does|do) not come", "a rank that does not arrive"),
    "least, most (for limits)": Retired("(MOST|LEAST)_", "MIN_, MAX_"),
}
REMAINING: dict[str, int] = {
    "behind (in time)": 12,
}
"""How often a word may still be used, here in another sense. Only to be lowered."""


def places(pattern: str) -> Iterator[str]:
    """File, line and text where a pattern is found, of names of tests too."""
    word = re.compile(f"(?<![A-Za-z])(?:{pattern})(?![A-Za-z])", re.IGNORECASE)
    for path in _files():
        is_test = path.is_relative_to(ROOT / "tests")
        if word.search(path.stem):
            yield f"{path.relative_to(ROOT)}: the name"
        for number, line in enumerate(path.read_text().splitlines(), 1):
            text = line
            if is_test:  # its name and no more
                found = re.match(r"\s*(?:async )?(?:def|class) ([Tt]est\w*)", line)
                text = found[1].replace("_", " ") if found else ""
            for _ in word.finditer(text):
                yield f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def _files() -> Iterator[Path]:
    for folder, endings in (
        ("src", ("py",)),
        ("docs", ("md",)),
        ("examples", ("py", "md")),
        ("tests", ("py",)),
    ):
        for ending in endings:
            yield from sorted((ROOT / folder).rglob(f"*.{ending}"))
    yield from (ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"))


@pytest.mark.parametrize("word", RETIRED)
def test_retired_words_stay_retired(word: str) -> None:
    found = [place for place in places(RETIRED[word].pattern) if not _is_left_out(place)]
    assert len(found) <= REMAINING.get(word, 0), f"write '{RETIRED[word].instead}':\n" + "\n".join(
        found
    )


def _is_left_out(place: str) -> bool:
    return ROOT / place.partition(":")[0] in {*LEFT_OUT, Path(__file__)}


def test_the_page_lists_them() -> None:
    text = PAGE.read_text()
    rows = [f"| {word} | {instead} |" for word, (_, instead) in RETIRED.items()]
    assert [row for row in rows if row not in text] == []


def test_what_remains_is_a_retired_word() -> None:
    assert REMAINING.keys() <= RETIRED.keys()
    assert all(REMAINING.values())


def test_terms_have_one_line_each() -> None:
    terms = re.findall(r"^\| ([a-z][^|]*) \| [A-Z].*\.(?: |`|$)", PAGE.read_text(), re.MULTILINE)
    assert len(terms) == len(set(terms)) > 50


@pytest.mark.parametrize(
    ("text", "is_found"),
    [("it goes on", True), ("_gate_of", True), ("aggregate", False), ("no more than", False)],
)
def test_patterns(text: str, is_found: bool) -> None:
    patterns = "|".join(retired.pattern for retired in RETIRED.values())
    found = re.search(f"(?<![A-Za-z])(?:{patterns})(?![A-Za-z])", text, re.IGNORECASE)
    assert bool(found) == is_found


if __name__ == "__main__":
    for name, retired in RETIRED.items():
        lines = [line for line in places(retired.pattern) if not _is_left_out(line)]
        if name in sys.argv[1:]:
            print("\n".join(lines))
        elif len(sys.argv) == 1 and lines:
            print(f'    "{name}": {len(lines)},')
