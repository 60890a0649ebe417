"""Imports point down: a unit imports only rows below its own (ARCHITECTURE.md shows the rows).

A unit is a folder or a file in ``src/torchmn``. Rows that are strictly ordered leave no circle.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "torchmn"
ROOT = "torchmn"  # the unit of ``torchmn/__init__.py``, which loads the public names on first use
# Of the root: to read it loads nothing, so that it counts as a unit of its own.
VERSION = "__version__"
ROWS = [
    {"__main__"},
    {"cli"},
    {ROOT},
    {"testing", "doctor", "submit", "cntk", "links", "functions", "errors"},
    {"train"},
    {"run"},
    {"observe", "checkpoint"},
    {"exchange"},
    {"nn"},
    {"data"},
    {"comm"},
    {"record"},
    {"control"},
    {"cluster"},
    {"base", VERSION},
]
LEVEL = {unit: level for level, row in enumerate(ROWS) for unit in row}
# What trains needs no launcher, but for the updater that starts processes; CNTK's sessions know
# preemption.
MAY_IMPORT_RUN = {"cli", "doctor", "submit", "cntk", "train", ROOT}


def unit_of(path: Path) -> str:
    name = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return ROOT if name == "__init__" else name


def imported_units(path: Path, units: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Each unit that a file imports, at any depth of its code, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "torchmn":
                found = parts[1] if len(parts) > 1 else ROOT
                yield (found if found in units else ROOT), node.lineno


def violations(source: Path) -> list[str]:
    files = sorted(source.rglob("*.py"))
    units = frozenset(unit_of(path) for path in files) | LEVEL.keys()
    found = []
    for path in files:
        own = unit_of(path)
        for other, line in imported_units(path, units):
            if other == own:
                continue
            where = f"{path.relative_to(source)}:{line} imports {other}"
            if LEVEL[other] <= LEVEL[own]:
                found.append(where)
            elif other == "run" and own not in MAY_IMPORT_RUN:
                found.append(f"{where}, which only {sorted(MAY_IMPORT_RUN)} may")
    return found


def test_rows_hold_every_unit_and_no_other() -> None:
    assert {VERSION, *(unit_of(path) for path in SOURCE.rglob("*.py"))} == set(LEVEL)
    assert len(LEVEL) == sum(len(row) for row in ROWS)


def test_imports_point_down() -> None:
    assert violations(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "line", "imported"),
    [
        ("cluster/wrong.py", "from torchmn.comm import create", "comm"),
        ("cluster/wrong.py", "from torchmn import comm", "comm"),
        ("comm/wrong.py", "import torchmn.exchange.schedules.base", "exchange"),
        ("data/wrong.py", "def f():\n    import torchmn.train.trainer", "train"),
        ("checkpoint/wrong.py", "import torchmn", "torchmn"),
        ("checkpoint/wrong.py", "from torchmn import Trainer", "torchmn"),
    ],
)
def test_the_check_sees_an_import_that_points_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, line: str, imported: str
) -> None:
    wrong = tmp_path / file
    wrong.parent.mkdir()
    wrong.write_text(f"{line}\n")
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (found,) = violations(tmp_path)
    assert found.startswith(f"{file}:")
    assert found.endswith(f"imports {imported}")


@pytest.mark.parametrize(
    "module",
    [
        "torchmn",
        "torchmn.cluster",
        "torchmn.control.script",
        "torchmn.run.agent_main",
        "torchmn.submit",
        "torchmn.doctor.examination",
        "torchmn.cli.app",
    ],
)
def test_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules, 'mpi4py.MPI' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "False"], result.stderr
