"""``torchmn --version`` says what is here without importing it."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path

import pytest

import torchmn
from torchmn.cli import versions
from torchmn.cli.versions import versions_text


def rows(**env: str) -> dict[str, str]:
    first, *lines = versions_text(env).splitlines()
    assert first == f"torchmn {torchmn.__version__}"
    return dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines)


def test_versions_of_this_machine() -> None:
    found = rows(PATH="/usr/bin:/bin")
    assert found["Python"] == platform.python_version()
    assert found["torch"] == metadata.version("torch")
    assert found.keys() == {"Python", "torch", "gloo", "NCCL", "MPI", "codec kernels", "schedulers"}


def test_schedulers_by_their_commands(tmp_path: Path) -> None:
    assert rows(PATH=str(tmp_path))["schedulers"] == "none found on the PATH"
    for command in ("sbatch", "kubectl"):
        (tmp_path / command).touch(mode=0o755)
    assert rows(PATH=str(tmp_path))["schedulers"] == "Slurm (sbatch)"


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = None", ""),
        ("cuda: Optional[str] = '12.8'", "12.8"),
        ('cuda = "12.6"', "12.6"),
    ],
)
def test_cuda_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, cuda: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError")
    (tmp_path / "torch" / "version.py").write_text(f"debug = False\n{line}\nhip = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert versions._cuda_of_torch() == cuda


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(versions.metadata, "version", version)
    found = rows(PATH="")
    assert found["torch"] == "not installed"
    assert "no mpi4py" in found["MPI"]
    assert found["codec kernels"].startswith("no numba")
