"""The public surface is each package's __all__, and every name is documented."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import torchmn
from tests.limits import limit

from .names import PAGE, packages, page, without_example

DOCS = Path(__file__).parents[2] / "docs"
SOURCE = Path(torchmn.__file__).parent
INTERNAL = {
    "autotune",
    "batch_settings",
    "cli",
    "compiling",
    "control",
    "doctor",
    "environment_variables",
    "exit_status",
    "gradients",
    "model_tensors",
    "monitor",
    "permutations",
    "planning",
    "report",
    "resharding",
    "rng_state",
    "script",
    "version",
}
"""Units that users have no reason to import: they have no ``__all__``."""
PACKAGES = sorted(
    path.parent.name for path in SOURCE.glob("*/__init__.py") if path.parent.name not in INTERNAL
)


def test_the_root_is_small() -> None:
    assert len(torchmn.__all__) <= 40


def test_all_is_reality() -> None:
    assert set(torchmn.__all__) == set(torchmn._HOME)
    assert set(torchmn.__all__) <= set(dir(torchmn))


@pytest.mark.parametrize("name", torchmn.__all__)
def test_name_loads_and_has_a_docstring(name: str) -> None:
    value = getattr(torchmn, name)
    assert inspect.getdoc(value)


@pytest.mark.parametrize("package", PACKAGES)
def test_names_of_a_package_exist_and_have_docstrings(package: str) -> None:
    module = import_module(f"torchmn.{package}")
    assert module.__doc__
    assert len(module.__all__) == len(set(module.__all__))
    values = {name: getattr(module, name) for name in module.__all__}
    code = {n: v for n, v in values.items() if inspect.isclass(v) or inspect.isroutine(v)}
    assert [name for name, value in code.items() if not inspect.getdoc(value)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_imports_is_in_all(package: str) -> None:
    """From its own modules: nothing public is missing."""
    tree = ast.parse((SOURCE / package / "__init__.py").read_text())
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchmn.")
        for alias in node.names
        if (alias.asname or "") != alias.name  # a submodule, for type checkers
        for name in (
            import_module(str(node.module)).__all__
            if alias.name == "*"
            else [alias.asname or alias.name]
        )
    }
    names = set(import_module(f"torchmn.{package}").__all__)
    assert {name for name in imported if not name.startswith("_")} == names


@pytest.mark.parametrize("name", torchmn.__all__)
def test_root_names_are_described(name: str) -> None:
    """On a page that is written by hand."""
    pages = "\n".join(p.read_text() for p in (DOCS / "reference").glob("*.md") if p != PAGE)
    assert re.search(rf"`(torchmn\.)?{name}\b", pages), f"docs/reference does not describe {name}"


def test_every_package_is_in_the_reference() -> None:
    assert {"", *PACKAGES} == set(packages())
    assert PAGE.read_text() == page(), "write it again: python -m tests.project.names"


@pytest.mark.parametrize("unit", sorted(INTERNAL))
def test_internal_units_have_no_public_names(unit: str) -> None:
    assert (SOURCE / f"{unit}.py").exists() or (SOURCE / unit / "__init__.py").exists()
    if (SOURCE / unit).is_dir():
        assert "__all__" not in (SOURCE / unit / "__init__.py").read_text()


def test_submodules_are_all_that_is_not_internal() -> None:
    found = {path.stem for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"}
    found = {name for name in found if not name.startswith("__")}
    assert found - INTERNAL == set(torchmn._SUBMODULES)
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
    subprocess.run([sys.executable, "-c", script], check=True, timeout=limit(50))


def test_names_have_examples_that_run() -> None:
    assert without_example() == []


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        torchmn.nothing  # noqa: B018
