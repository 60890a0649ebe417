"""The public surface is what __all__ says, and every name is documented."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
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


def test_submodules_are_all_there_is_beside_the_command_line() -> None:
    folder = Path(torchmn.__file__).parent
    found = {path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}
    found = {name for name in found if not name.startswith("__")}
    assert found - {"cli"} == set(torchmn._SUBMODULES)
    assert set(torchmn._SUBMODULES) <= set(dir(torchmn))


def test_submodules_load_by_attribute_after_a_plain_import() -> None:
    script = (
        "import sys, torchmn\n"
        "assert 'torch' not in sys.modules\n"
        "for name in sorted(torchmn._SUBMODULES):\n"
        "    for loaded in [m for m in sys.modules if m.startswith('torchmn.')]:\n"
        "        vars(torchmn).pop(loaded.split('.')[1], None)\n"
        "    assert getattr(torchmn, name).__name__ == f'torchmn.{name}'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=50)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        torchmn.nothing  # noqa: B018
