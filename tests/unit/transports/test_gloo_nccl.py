"""gloo and NCCL as a transport: what the library does not survive by itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import time
from torchmn.errors import CommunicationError
from torchmn.testing import run_ranks
def rank_main(comm):
    try:
        comm.barrier() if comm.rank == 1 else comm.allgather_obj(1)
    except CommunicationError as error:
        print("message:", error)
    time.sleep(1)
run_ranks(rank_main, 3, timeout_s=1)
"""


@pytest.mark.processes
def test_ranks_in_different_collectives_raise() -> None:
    """gloo ends the process when the sizes of two messages with one tag differ."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert "terminate called" not in done.stderr, done.stderr[-300:]
    assert done.stdout.count("message:") == 3
