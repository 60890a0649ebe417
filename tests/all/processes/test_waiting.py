"""A rank that is stopped is not waited for as long as one that works, without any launcher."""

import pytest

from tests.all.processes.runner import Runner, finish
from tests.limits import limit

pytestmark = pytest.mark.processes

SCRIPT = """
import ctypes, os, signal, sys
import torch, torchmn
timeout = torchmn.Timeout(unreachable_s=limit(1), busy_s=limit(60), first_s=limit(1))
comm = torchmn.create_communicator("naive", timeout_s=timeout)
comm.barrier()
if comm.rank == 0:
    if sys.argv[1] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    ctypes.PyDLL(None).sleep(int(limit(3)))  # as a C extension does that holds the interpreter
print(comm.allreduce(torch.ones(1)).item())
"""


@pytest.mark.parametrize("fault", ["stop", "hold the interpreter"])
def test_the_state_of_a_process_that_does_not_answer(runner: Runner, fault: str) -> None:
    first, second = runner.start_ranks(2, runner.script(SCRIPT), fault, OMP_NUM_THREADS="1")
    done = finish(second, 50)
    if fault == "stop":
        assert done.returncode == 1, done.stderr
        assert "is stopped by a signal" in done.stderr
        first.kill()
        first.wait(limit(20))
    else:
        assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
        assert first.wait(limit(20)) == 0
