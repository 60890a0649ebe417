"""Imports point down: a folder imports only the rows below its own (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "torchmn"
ROWS = [
    {"cli"},
    {"testing", "diagnostics"},
    {"training", "scaling"},
    {
        "exchange",
        "data",
        "model_parallel",
        "large_batch",
        "checkpoint",
        "resilience",
        "profiling",
        "evaluation",
    },
    {"communicators"},
    {"compression", "launch"},
    {"topology"},
    {"errors", "units", "records"},
]
LEVEL = {unit: level for level, row in enumerate(ROWS) for unit in row}


def unit_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_units(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "torchmn" and len(parts) > 1:
                yield parts[1]


MODULES = [p for p in sorted(SOURCE.rglob("*.py")) if unit_of(p) not in ("__init__", "__main__")]


def violations(path: Path) -> list[str]:
    own = unit_of(path)
    return [
        f"{path.relative_to(SOURCE)} imports {other}"
        for other in imported_units(path)
        if other != own and LEVEL[other] <= LEVEL[own]
    ]


def test_every_folder_has_a_row() -> None:
    assert {unit_of(path) for path in MODULES} <= set(LEVEL)


def test_imports_point_down() -> None:
    assert [line for path in MODULES for line in violations(path)] == []


def test_the_check_sees_an_upward_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "topology" / "wrong.py"
    wrong.parent.mkdir()
    wrong.write_text("from torchmn.exchange import EveryStep\n")
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert violations(wrong) == ["topology/wrong.py imports exchange"]


@pytest.mark.parametrize(
    "module", ["torchmn", "torchmn.topology", "torchmn.launch", "torchmn.cli.main"]
)
def test_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules, 'mpi4py.MPI' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "False"], result.stderr
