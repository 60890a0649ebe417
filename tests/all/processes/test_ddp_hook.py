"""Codecs as a communication hook of DistributedDataParallel, on three real ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.all.processes.runner import PYTHON_PATH
from tests.limits import limit

from .ddp_hook_script import checks

pytestmark = pytest.mark.processes

NUM_RANKS = 3
SCRIPT = Path(__file__).with_name("ddp_hook_script.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What every rank says of every check; the three processes run once for all tests."""
    folder = tmp_path_factory.mktemp("ddp_hook")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = PYTHON_PATH
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                SCRIPT,
                str(rank),
                str(NUM_RANKS),
                str(store.port),
                folder / str(rank),
            ],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        errors = [process.communicate(timeout=limit(55))[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    assert codes == [0] * NUM_RANKS, f"{codes}: {errors}"
    return [json.loads((folder / str(rank)).read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("name", checks())
def test_hook(name: str, outcomes: list[dict[str, str]]) -> None:
    num_ranks, _ = checks()[name]
    for rank in range(num_ranks):
        assert outcomes[rank][name] == "ok", f"rank {rank}: {outcomes[rank][name]}"
