"""The command line starts fast and light, and says what it can do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torchmn

SOURCES = str(Path(torchmn.__file__).parents[1])


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={"PYTHONPATH": SOURCES, "PATH": "/usr/bin:/bin", "COLUMNS": "100"},
    )


@pytest.mark.processes
def test_help_lists_the_subcommands() -> None:
    done = run("-m", "torchmn", "--help")
    assert done.returncode == 0
    assert "run" in done.stdout
    assert run("-m", "torchmn", "run", "--help").stdout.count("--backend") == 1


@pytest.mark.processes
def test_version() -> None:
    done = run("-m", "torchmn", "--version")
    assert done.stdout.split() == ["torchmn", torchmn.__version__]


@pytest.mark.processes
def test_unknown_subcommand_is_one_sentence() -> None:
    done = run("-m", "torchmn", "fly")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "fly" in done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    "module",
    ["torchmn.cli.main", "torchmn.launch", "torchmn.launch.agent_main", "torchmn.topology"],
)
def test_starts_without_heavy_modules(module: str) -> None:
    code = f"import sys, {module}; print([m for m in sys.modules if m in {HEAVY}])"
    assert run("-c", code).stdout.strip() == "[]"


HEAVY = ("torch", "numpy", "mpi4py.MPI", "pytorch_pfn_extras")
