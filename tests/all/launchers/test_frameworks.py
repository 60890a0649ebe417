"""Scripts of other frameworks train under `torchmn run` as under torchrun, unchanged."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.smoke.test_launchers import launcher

FOLDER = Path(__file__).parent / "frameworks"
TORCHRUN = (
    sys.executable,
    *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
)
TORCHMN_RUN = (sys.executable, *["-m", "torchmn", "run", "-n", "2", "--backend"])


def train(framework: str, folder: Path, *command: str) -> list[torch.Tensor]:
    """The parameters that a script of the framework has trained."""
    folder.mkdir()
    done = subprocess.run(
        [*command, str(FOLDER / f"{framework}_script.py"), str(folder / "trained.pt")],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trained: list[torch.Tensor] = torch.load(folder / "trained.pt")
    return trained


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_two_ranks_train_as_under_torchrun(tmp_path: Path, framework: str) -> None:
    """To the bit, whichever backend torchmn itself would use; the scripts check their world."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(reason=f"{framework} is not installed (pip install {framework})")
    launcher("mpirun")
    expected = train(framework, tmp_path / "torchrun", *TORCHRUN)
    for backend in ("gloo", "mpi"):
        trained = train(framework, tmp_path / f"torchmn {backend}", *TORCHMN_RUN, backend)
        torch.testing.assert_close(trained, expected, rtol=0, atol=0)
    if framework == "accelerate":  # the others choose other samples on two ranks
        alone = train(framework, tmp_path / "one process", sys.executable)
        torch.testing.assert_close(expected, alone)
