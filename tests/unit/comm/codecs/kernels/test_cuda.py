"""The Triton kernels, by Triton's interpreter where there is no GPU."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from tests.unit.comm.codecs.cuda_kernels import compare

ROOT = Path(__file__).parents[5]

TRITON = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else ""
needs_triton = pytest.mark.skipif(
    not TRITON, reason="triton is not installed (1 GB in addition to a torch for CPUs)"
)


def run(what: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.comm.codecs.cuda_kernels", what],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
@pytest.mark.skipif(
    bool(TRITON) and Version(TRITON) < Version("3.3"),
    reason="the interpreter of Triton 3.2 stores in spite of a mask that is False",
)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_by_the_interpreter() -> None:
    assert "136 cases agree" in run("cpu", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_they_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    assert "16 kernels compiled" in run("compile", TRITON_CACHE_DIR=str(tmp_path))


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    assert compare("cuda") == 136
