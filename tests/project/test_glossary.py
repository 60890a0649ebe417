"""Retired words are not used again; docs/project/retired-words.md lists what to write instead.

``python -m tests.project.test_glossary WORD`` shows where a word is used.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGE = ROOT / "docs" / "project" / "retired-words.md"
GENERATED = ("docs/reference/messages.md", "docs/reference/names.md")
LEFT_OUT = {PAGE, Path(__file__), *(ROOT / name for name in GENERATED)}
"""The page and this file, which list the words, and pages that a script writes from the source."""


class Retired(NamedTuple):
    pattern: str
    """Of a word, which may be a part of an identifier: letters around it make another word."""
    instead: str


RETIRED = {
    "behind (in time)": Retired(r"(?<!left\s)(?<!leave\s)(?<!leaves\s)(?<!far\s)behind", "after"),
    "go on": Retired(r"(go|goes|going|gone|went)\s+on", "continue, resume"),
    "everybody, everyone": Retired("(everybod(y|ies)|everyone)", "all ranks, `gathered`"),
    "nobody, somebody": Retired("(nobody|somebody|someone)", "no rank, a caller"),
    "so many": Retired(r"(so|equally)\s+many", "n, the same number of"),
    "alike": Retired("alike", "identically, the same"),
    "anew": Retired("anew", "again, from scratch"),
    "owe, owed": Retired("ow(e|es|ed|ing)", "residual, is pending"),
    "debt, settle": Retired("(debts?|settle[sd]?)", "residual, flush"),
    "he, his": Retired(r"(he(?!\s+et\s+al)|his|him|himself)", "it, they"),
    "verdict, judge": Retired("(verdicts?|judges?|judged)", "job result, summarize"),
    "culprit, guilty": Retired("(culprits?|guilty)", "first failure, failed rank"),
    "victim": Retired("victims?", "rank that was ended"),
    "blame": Retired("(blame[sd]?|blaming)", "cause, name"),
    "obituary": Retired("obituar(y|ies)", "exit report"),
    "stranger, visitor": Retired("(strangers?|visitors?)", "unauthenticated client, peer"),
    "knock": Retired("knock(s|ed|ing)?", "connect"),
    "door, gate": Retired("(doors?|gates?)", "listener"),
    "cargo, freight": Retired("(cargos?|freights?)", "buffer, block"),
    "wire": Retired(r"wires?(?!\s+format)", "message, network"),
    "parcel": Retired("parcels?", "chunk, message"),
    "journal": Retired("journals?", "flight recorder"),
    "gone astray": Retired("astray", "diverged"),
    "residue": Retired("residues?", "residual"),
    "speaker": Retired("speakers?", "rank label"),
    "no more": Retired(r"no\s+more(?!\s+(than|[a-z]+s)\b)", "no longer"),
    "told, said": Retired("(told|said|hears?|heard)", "message, reply, report"),
    "sentence, last words": Retired(r"(sentences?|(last|same)\s+words)", "message, text, report"),
    "who does not come": Retired(r"who\s+(does|do)\s+not\s+come", "a rank that does not arrive"),
    "least, most (for limits)": Retired(r"(?-i:(MOST|LEAST)\s+[A-Z]+)", "MIN_, MAX_"),
}
REMAINING: dict[str, int] = {
    "behind (in time)": 12,
    "go on": 2,
    "everybody, everyone": 6,
    "sentence, last words": 1,
}
"""How often a word may still be used, in another sense or not yet replaced. Only to be lowered."""


@functools.cache
def places() -> dict[str, list[str]]:
    """By retired word, where it is used: file, line and text."""
    found: dict[str, list[str]] = {word: [] for word in RETIRED}
    for path in _files():
        name, lines = path.relative_to(ROOT), path.read_text().splitlines()
        for word, _ in _words_in(path.stem):
            found[word].append(f"{name}: the name")
        for word, number in _words_in(path.read_text()):
            found[word].append(f"{name}:{number}: {lines[number - 1].strip()}")
    return found


def _words_in(text: str) -> Iterator[tuple[str, int]]:
    """Retired words with their lines: also in identifiers, and over the end of a line."""
    words = tuple(RETIRED)
    text = re.sub("(?<=[a-z])(?=[A-Z])", " ", text.replace("_", " "))  # GoesOn, goes_on
    for found in _any_word().finditer(text):
        yield words[int(str(found.lastgroup)[1:])], text.count("\n", 0, found.start()) + 1


@functools.cache
def _any_word() -> re.Pattern[str]:
    groups = [f"(?P<_{i}>{retired.pattern})" for i, retired in enumerate(RETIRED.values())]
    return re.compile(f"(?<![A-Za-z])(?:{'|'.join(groups)})(?![A-Za-z])", re.IGNORECASE)


def _files() -> list[Path]:
    found: list[Path] = []
    for folder, endings in (
        ("src", ("py",)),
        ("docs", ("md",)),
        ("examples", ("py", "md")),
        ("tests", ("py",)),
        ("benchmarks", ("py", "md")),
    ):
        for ending in endings:
            found += sorted((ROOT / folder).rglob(f"*.{ending}"))
    found += (ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"))
    return [path for path in found if path not in LEFT_OUT]


@pytest.mark.parametrize("word", RETIRED)
def test_retired_words_stay_retired(word: str) -> None:
    found = places()[word]
    assert len(found) <= REMAINING.get(word, 0), f"write '{RETIRED[word].instead}':\n" + "\n".join(
        found
    )


def test_the_page_lists_them() -> None:
    text = PAGE.read_text()
    rows = [f"| {word} | {instead} |" for word, (_, instead) in RETIRED.items()]
    assert [row for row in rows if row not in text] == []


def test_what_remains_is_a_retired_word() -> None:
    assert REMAINING.keys() <= RETIRED.keys()
    assert all(REMAINING.values())


def test_terms_have_one_line_each() -> None:
    terms = re.findall(
        r"^\| ([a-z][^|]*) \| [A-Z].*\.(?: |`|$)", GLOSSARY.read_text(), re.MULTILINE
    )
    assert len(terms) == len(set(terms)) > 50


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("it goes on", True),
        ("it goes\n    on", True),
        ("class GoesOnAlone", True),
        ("_gate_of", True),
        ("MOST_PEERS = 8", True),
        ("at most one", False),
        ("aggregate", False),
        ("no more than", False),
        ("He et al.", False),
    ],
)
def test_patterns(text: str, is_found: bool) -> None:
    assert bool([*_words_in(text)]) == is_found


if __name__ == "__main__":
    for word, lines in places().items():
        if word in sys.argv[1:]:
            print("\n".join(lines))
        elif len(sys.argv) == 1 and lines:
            print(f'    "{word}": {len(lines)},')
