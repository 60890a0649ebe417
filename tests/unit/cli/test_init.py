"""``torchmn init``: what it writes trains, and it replaces nothing by itself."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from tests.all.processes.runner import PYTHON_PATH
from tests.limits import limit
from torchmn.cli.app import app
from torchmn.cli.init import KINDS
from torchmn.errors import DataError, TorchmnError, UnknownNameError, UsageError
from torchmn.submit.site import SCHEDULERS


def init(folder: Path, *words: str) -> Result:
    done = CliRunner().invoke(app, ["init", str(folder), *words])
    if isinstance(done.exception, TorchmnError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(autouse=True)
def _no_site_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def run(folder: Path, *words: str, limit_s: float = 100) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "torchmn", "run", "-n", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        timeout=limit(limit_s),
        check=False,
    )


def numbers(line: str) -> list[float]:
    """The loss and the accuracy of a line."""
    return [float(text) for text in re.findall(r"\d\.\d+", line)]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_trains_and_resumes(tmp_path: Path, kind: str) -> None:
    """Two ranks compute what one does, and a second start continues on another number."""
    folder = tmp_path / kind
    init(folder, "--kind", kind, "--scheduler", "none")
    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]
    two = run(folder, "2", "--backend", "gloo", "train.py", "--epochs", "1")
    assert two.returncode == 0, two.stderr
    (line,) = two.stdout.splitlines()
    assert line.startswith("[0] epoch 1: test loss ")
    one = run(
        folder, "1", "--backend", "gloo", "train.py", "--epochs", "1", "--checkpoints", "other"
    )
    if kind != "tabular":  # which has dropout
        (alone,) = one.stdout.splitlines()
        assert numbers(alone) == pytest.approx(numbers(line), abs=1e-3)  # sums in another order
    more = run(folder, "1", "--backend", "gloo", "train.py", "--epochs", "2")
    assert more.returncode == 0, more.stderr
    resumed, later = more.stdout.splitlines()
    assert resumed.startswith("[0] continuing after step "), resumed
    assert resumed.endswith(": 1 of 2 epochs are done"), resumed
    assert "other samples" not in more.stderr
    assert later.startswith("[0] epoch 2: test loss ")
    assert float(later.split()[-1]) >= float(line.split()[-1]) - 0.05
    assert (folder / "model.pt").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_is_whole(tmp_path: Path, kind: str) -> None:
    init(tmp_path, "--kind", kind, "--scheduler", "none")
    tree = ast.parse((tmp_path / "train.py").read_text())
    names = [each.name for each in tree.body if isinstance(each, ast.FunctionDef)]
    assert names == ["load_data", "build_model", "loss_of", "evaluate", "main"]


@pytest.mark.parametrize("scheduler", ["pbs", "slurm"])
def test_a_job_file(tmp_path: Path, scheduler: str) -> None:
    words = ["--nodes", "2", "--per-node", "4", "--walltime", "02:30:00"]
    done = init(tmp_path / "own", "--scheduler", scheduler, *words)
    name = f"train.{scheduler}.sh"
    path = tmp_path / "own" / name
    text = path.read_text()
    assert "train.py" in text
    assert "02:30:00" in text
    assert path.stat().st_mode & 0o077 == 0
    assert f"{SCHEDULERS[scheduler].submit_command[0]} {name}" in done.output
    assert "torchmn run -n 2 train.py" in done.output


def test_the_site_file_is_used(tmp_path: Path) -> None:
    (tmp_path / "torchmn.toml").write_text(
        'scheduler = "grid_engine"\n[grid_engine]\nparallel_environment = "mpi"\n'
    )
    init(tmp_path / "own", "--per-node", "2")
    assert "#$ -pe mpi 2" in (tmp_path / "own" / "train.grid_engine.sh").read_text()


def test_nothing_is_replaced_by_itself(tmp_path: Path) -> None:
    init(tmp_path, "--scheduler", "none")
    script = tmp_path / "train.py"
    script.write_text("mine\n")
    with pytest.raises(UsageError, match=r"train.py exists already: .*keeps the old one as NAME~"):
        init(tmp_path, "--scheduler", "slurm")
    assert script.read_text() == "mine\n"
    assert not (tmp_path / "train.slurm.sh").exists()
    init(tmp_path, "--scheduler", "none", "--force")
    assert script.with_name("train.py~").read_text() == "mine\n"
    assert "torchmn" in script.read_text()


BAD_IMAGES: dict[str, dict[str, np.ndarray]] = {
    "three axes": {"images": np.zeros((90, 8, 8)), "classes": np.zeros(90)},
    "fewer classes": {"images": np.zeros((90, 1, 8, 8)), "classes": np.zeros(89)},
    "below zero": {"images": np.zeros((90, 1, 8, 8)), "classes": np.full(90, -1)},
    "fractions": {"images": np.zeros((90, 1, 8, 8)), "classes": np.full(90, 0.5)},
    "nothing": {"images": np.zeros((0, 1, 8, 8)), "classes": np.zeros(0)},
    "other names": {"x": np.zeros((90, 1, 8, 8)), "y": np.zeros(90)},
}
BAD_TABLES = {
    "a word": "a,b,c\n1,x,0\n",
    "fractions": "a,b\n1,0.5\n",
    "below zero": "a,b\n1,-1\n",
    "not finite": "a,b\nnan,1\n",
    "one column": "a\n1\n",
    "ragged": "a,b\n1,2\n1\n",
}


def template(kind: str) -> ModuleType:
    return importlib.import_module(f"torchmn.cli.templates.{kind}")


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_images_that_do_not_fit(tmp_path: Path, case: str) -> None:
    np.savez(tmp_path / "bad.npz", **BAD_IMAGES[case])  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"bad\.npz (has images|is no \.npz file)"):
        template("image").load_data(str(tmp_path / "bad.npz"))


@pytest.mark.parametrize("case", BAD_TABLES)
def test_tables_that_do_not_fit(tmp_path: Path, case: str) -> None:
    (tmp_path / "bad.csv").write_text(BAD_TABLES[case])
    with pytest.raises(DataError, match=r"bad\.csv (is no table|must have columns)"):
        template("tabular").load_data(str(tmp_path / "bad.csv"))


@pytest.mark.filterwarnings("ignore:loadtxt")
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_not_there_or_no_data(tmp_path: Path, kind: str) -> None:
    (tmp_path / "short").write_text("a")
    for name in ("none", "short"):
        with pytest.raises(DataError, match=name):
            template(kind).load_data(str(tmp_path / name))


def test_the_data_say_how_many_classes_there_are(tmp_path: Path) -> None:
    """All of them, whatever the part of the data that a rank trains on."""
    classes = np.arange(100) // 96 * 6  # 6 in the last four only
    np.savez(tmp_path / "a.npz", images=np.zeros((100, 3, 8, 8)), classes=classes)
    images = template("image")
    train, _ = images.load_data(str(tmp_path / "a.npz"))
    assert images.build_model(train)(torch.zeros(2, 3, 8, 8)).shape == (2, 7)
    rows = "".join(f"1,2,{each}\n" for each in classes)
    (tmp_path / "a.csv").write_text(f"a,b,class\n{rows}")
    table = template("tabular")
    train, _ = table.load_data(str(tmp_path / "a.csv"))
    assert table.build_model(train)(torch.zeros(2, 2)).shape == (2, 7)


def test_a_script_that_cannot_be_written(tmp_path: Path) -> None:
    """There is no --output to name, as for a job script."""
    (tmp_path / ".train.py.new" / "in the way").mkdir(parents=True)
    with pytest.raises(
        UsageError, match=r"train\.py cannot be written \(.*\): name another folder"
    ):
        init(tmp_path, "--scheduler", "none")


def test_names_that_are_unknown(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="kind 'sound'. Known: image, text, tabular"):
        init(tmp_path / "a", "--kind", "sound")
    with pytest.raises(UnknownNameError, match="scheduler 'lsf'. Known: .*grid_engine, none"):
        init(tmp_path / "a", "--scheduler", "lsf")
    with pytest.raises(UsageError, match=r"docs/how-to/kubernetes\.md"):
        init(tmp_path / "a", "--scheduler", "kubernetes")
    assert not (tmp_path / "a").exists()
