"""What type checkers say of a user's script."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchmn
from tests.limits import limit

SCRIPT = Path(__file__).with_name("typed_script.py")
SOURCE = Path(torchmn.__file__).parents[1]
EXPECTED = {
    number
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
    if line.endswith("# refused")
}

pytestmark = pytest.mark.timeout(limit(300))


def lines_with_errors(command: list[str], folder: Path) -> set[int]:
    """The lines of the script in which a type checker finds errors."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = re.findall(rf"{SCRIPT.name}:(\d+):.*error", done.stdout)
    assert found, done.stdout + done.stderr
    return {*map(int, found)}


def test_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = True\nmypy_path = {SOURCE}\n")
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(SCRIPT)]
    assert lines_with_errors(command, tmp_path) == EXPECTED


def test_pyright(tmp_path: Path) -> None:
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip(reason="pyright is not installed")
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{SOURCE}"]}}')
    command = [pyright, "--pythonpath", sys.executable, "-p", str(tmp_path), str(SCRIPT)]
    assert lines_with_errors(command, tmp_path) == EXPECTED
