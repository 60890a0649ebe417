"""The glossary: one line for each term."""

from __future__ import annotations

import re
from pathlib import Path

GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"


def test_terms_have_one_line_each() -> None:
    terms = re.findall(
        r"^\| ([a-z][^|]*) \| [A-Z].*\.(?: |`|$)", GLOSSARY.read_text(), re.MULTILINE
    )
    assert len(terms) == len(set(terms)) > 50
