"""The public surface is what __all__ says, and every name is documented."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import torchmn

DOCS = Path(__file__).parents[2] / "docs"


def test_all_is_sorted_and_small() -> None:
    assert torchmn.__all__ == sorted(torchmn.__all__)
    assert len(torchmn.__all__) <= 30


def test_all_is_reality() -> None:
    assert set(torchmn.__all__) == set(torchmn._HOME)
    assert set(torchmn.__all__) <= set(dir(torchmn))


@pytest.mark.parametrize("name", torchmn.__all__)
def test_name_loads_and_has_a_docstring(name: str) -> None:
    value = getattr(torchmn, name)
    assert inspect.getdoc(value)


@pytest.mark.parametrize("name", torchmn.__all__)
def test_name_is_in_the_reference(name: str) -> None:
    pages = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    assert re.search(rf"`(torchmn\.)?{name}\b", pages), f"docs/reference says nothing of {name}"


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        torchmn.nothing  # noqa: B018
