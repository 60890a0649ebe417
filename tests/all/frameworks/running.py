"""Starts the scripts of this folder on two ranks, with the real frameworks."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchmn
from tests.limits import limit

FOLDER = Path(__file__).parent
TORCHMN_RUN = ("-m", "torchmn", "run", "-n", "2", "--backend", "gloo")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def need(*frameworks: str) -> None:
    """Skip where one of them is not installed."""
    for name in frameworks:
        if importlib.util.find_spec(name) is None:
            pytest.skip(reason=f"{name} is not installed (pip install {name})")


def start(script: str | Path, *args: object, by: tuple[str, ...], cwd: Path, **env: str) -> str:
    """Run a script of this folder and return what it printed; its exit status must be 0."""
    done = run(script, *args, by=by, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run(
    script: str | Path, *args: object, by: tuple[str, ...], cwd: Path, **env: str
) -> subprocess.CompletedProcess[str]:
    """As `start`, with any exit status."""
    # With torch's compiler, which the frameworks import.
    folders = [Path(torchmn.__file__).parents[1], FOLDER.parents[2], os.environ.get("PYTHONPATH")]
    python_path = os.pathsep.join(str(folder) for folder in folders if folder)
    return subprocess.run(
        [sys.executable, *by, str(FOLDER / script), *map(str, args)],
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": python_path,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=limit(240),
    )


def outcomes_of(script: str, folder: Path) -> list[dict[str, str]]:
    """What both ranks say of every check of a script, which runs once."""
    done = run(script, folder, by=TORCHMN_RUN, cwd=folder)
    files = [folder / f"{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), done.stdout + done.stderr
    return [json.loads(file.read_text()) for file in files]


def require_ok(name: str, outcomes: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert name in outcome, f"rank {rank} did not get to it: {list(outcome.values())[-1]}"
        assert outcome[name] == "ok", f"rank {rank}: {outcome[name]}"
