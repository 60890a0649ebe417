"""What a rank starts is no rank: programs and children are told so, and launchers make new jobs."""

import pytest

from tests.all.processes.runner import AS_ROOT, Runner, finish, mpirun_python
from tests.all.processes.test_run import lines_of

pytestmark = pytest.mark.processes

EVALUATE = r"""
import os, torchmn
comm = torchmn.create_communicator()
os.write(1, f"{comm.rank} {comm.size}\n".encode())  # at once, as others write there too
"""
TRAIN = """
import multiprocessing, subprocess, sys
import torchmn


def told(*command):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    return f"{done.returncode}: {(done.stdout or done.stderr).strip().splitlines()[-1]}"


def child():
    try:
        torchmn.create_communicator()
    except torchmn.errors.UsageError as error:
        print("0: child:", error, flush=True)


if __name__ == "__main__":
    comm = torchmn.create_communicator()
    if comm.rank == 1:
        print(told("evaluate.py"))
        for method in ("fork", "spawn"):
            process = multiprocessing.get_context(method).Process(target=child)
            process.start()
            process.join()
        print(told("-m", "torchmn", "run", "-n", "1", "evaluate.py"))
    comm.finalize()
    comm = torchmn.create_communicator()
    comm.barrier()
    if comm.rank == 1:
        print(told("evaluate.py"))
"""


def check(lines: list[str]) -> None:
    program, forked, spawned, job, after = lines
    for line in (program, forked, spawned, after):
        assert "was started by rank 1 of a job (process " in line
    assert program.startswith("1: torchmn.errors.UsageError: ")
    assert forked.startswith("0: child: ")
    assert job == "0: [0] 0 1"


def test_under_torchmn_run(runner: Runner, backend: str) -> None:
    runner.script(EVALUATE, "evaluate.py")
    script = runner.script(TRAIN)
    done = runner.run("-n", "2", "--backend", backend, script, limit_s=90)
    assert done.returncode == 0, done.stderr
    check(lines_of(done.stdout, 1))


def test_under_mpirun(runner: Runner) -> None:
    (runner.folder / "evaluate.py").write_text(EVALUATE)
    (runner.folder / "script.py").write_text(TRAIN)
    own = {**AS_ROOT, "PYTHONHASHSEED": "random"}
    done = runner.run_command(*mpirun_python(2), "script.py", limit_s=90, **own)
    assert done.returncode == 0, done.stderr
    check(done.stdout.splitlines())
    assert done.stderr.count("The ranks hash strings differently") == 1


@pytest.mark.parametrize(("seed", "number"), [("random", 1), ("0", 0)])
def test_other_launchers_do_not_make_ranks_hash_alike(
    runner: Runner, seed: str, number: int
) -> None:
    (runner.folder / "evaluate.py").write_text(EVALUATE)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = finish(runner.start_python(*torchrun, "evaluate.py", PYTHONHASHSEED=seed), 60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2", "1 2"]
    assert done.stderr.count("The ranks hash strings differently") == number
