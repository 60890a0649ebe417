"""A rank that is stopped is not waited for as long as one that works, without any launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.all.processes.runner import PYTHON_PATH, free_port
from tests.limits import limit

pytestmark = pytest.mark.processes

SCRIPT = """
import ctypes, os, signal, sys
import torch, torchmn
from tests.limits import limit
timeout = torchmn.Timeout(unreachable_s=limit(1), busy_s=limit(60), first_s=limit(1))
comm = torchmn.create_communicator("naive", timeout_s=timeout)
comm.barrier()
if comm.rank == 0:
    if sys.argv[1] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    ctypes.PyDLL(None).sleep(int(limit(3)))  # as a C extension does that holds the interpreter
print(comm.allreduce(torch.ones(1)).item())
"""


def start(script: Path, fault: str) -> list[subprocess.Popen[str]]:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}
    return [
        subprocess.Popen(
            [sys.executable, str(script), fault],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize("fault", ["stop", "hold the interpreter"])
def test_the_state_of_a_process_that_does_not_answer(tmp_path: Path, fault: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    began = time.monotonic()
    first, second = start(script, fault)
    try:
        shown, errors = second.communicate(timeout=limit(50))
        if fault == "stop":
            assert second.returncode == 1, errors
            assert "is stopped by a signal" in errors
            assert time.monotonic() - began < limit(50)
        else:
            assert (second.returncode, shown) == (0, "2.0\n"), errors
            assert first.wait(limit(20)) == 0
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
