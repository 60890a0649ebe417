"""Runs a function of `tests.all.gpu.work` on rank processes: on one GPU or on several.

As a script it is one rank: ``python -m tests.all.gpu.ranks FUNCTION FOLDER ROUTE TIMEOUT_S``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.all.processes.runner import AS_ROOT, PYTHON_PATH, free_port
from tests.limits import limit
from torchmn.cluster.environment_variables import SHARE_GPU_VARIABLE
from torchmn.cluster.gpus import may_share_gpus, shared_gpu_problem, shared_gpu_variables

Over = Literal["gloo", "mpi", "nccl"]
ROOT = Path(__file__).parents[3]
NCCL_VARIABLE = "TORCHMN_TEST_NCCL"
"""A file of NCCL 2.30 or later, which ranks that share a GPU preload."""
CHECK_LIMIT_VARIABLE = "TORCHMN_TEST_CHECK_LIMIT_S"
"""Seconds after which `check` kills a test; ranks are ended before, so that the test tells why."""
LIMIT_S = 150.0
_TAIL = 1500
ENDS_AT_ONCE = ("stuck_stream", "missing_rank")


def own_nccl() -> dict[str, str]:
    """The variable that preloads the NCCL that was given to `check`; none without one."""
    given = os.environ.get(NCCL_VARIABLE)
    return {} if given is None else {"LD_PRELOAD": given}


def needed(over: Over, size: int) -> str | None:
    """What is missing for ranks over a library, if anything is."""
    from torchmn.run.backend import find_mpirun

    num_gpus = torch.cuda.device_count()
    problem = shared_gpu_problem(size, num_gpus, may_share=may_share_gpus(os.environ))
    if over == "nccl" and problem:
        return f"{problem}, and this machine has {num_gpus}"
    if over == "mpi" and find_mpirun(os.environ) is None:
        return "no mpirun: install it with 'make setup'"
    return None


def run_work(
    function: str, over: Over, *, size: int = 2, route: str = "auto", timeout_s: float = 60
) -> None:
    """Run a function on ranks; AssertionError with what the first failed rank has printed.

    Over gloo and MPI all ranks share the first GPU.
    """
    missing = needed(over, size)
    if missing is not None:
        pytest.skip(reason=missing)
    with tempfile.TemporaryDirectory(prefix="torchmn-gpu-") as folder:
        _run(function, over, Path(folder), size, route, timeout_s)


def _run(function: str, over: Over, folder: Path, size: int, route: str, timeout_s: float) -> None:
    words = [
        sys.executable,
        "-m",
        "tests.all.gpu.ranks",
        function,
        str(folder),
        route,
        str(timeout_s),
    ]
    env = {**os.environ, "PYTHONPATH": f"{PYTHON_PATH}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    if over != "nccl" or torch.cuda.device_count() >= size:
        env.pop(SHARE_GPU_VARIABLE, None)
    if over != "nccl":
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        env["CUDA_VISIBLE_DEVICES"] = first
    else:
        env |= own_nccl()
    if over == "mpi":
        from torchmn.run.backend import find_mpirun

        env |= AS_ROOT
        env["OMPI_MCA_btl"] = "^ofi"
        mpirun = find_mpirun(os.environ) or "mpirun"
        jobs = [([mpirun, "-n", str(size), "--map-by", ":OVERSUBSCRIBE", *words], env)]
    else:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        jobs = [
            (
                words,
                {
                    **env,
                    **meeting,
                    **shared_gpu_variables(env, str(rank)),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(size),
                },
            )
            for rank in range(size)
        ]
    outputs = [folder / f"output{number}" for number in range(len(jobs))]
    processes = []
    for (command, variables), output in zip(jobs, outputs, strict=True):
        with output.open("w") as file:
            processes.append(
                subprocess.Popen(
                    command, env=variables, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
                )
            )
    limit_s = min(limit(LIMIT_S), 0.8 * float(os.environ.get(CHECK_LIMIT_VARIABLE, "inf")))
    deadline = time.monotonic() + limit_s
    try:
        statuses = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end within {limit_s:g} s: {_tails(outputs)}") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    done = len(list(folder.glob("done*")))
    if over == "mpi" and function in ENDS_AT_ONCE:
        statuses = []  # mpirun takes a rank without MPI_Finalize for one that has failed
    assert not any(statuses), f"exit status {statuses}: {_tails(outputs)}"
    assert done == size, f"{done} of {size} ranks have come to the end: {_tails(outputs)}"


def _tails(outputs: list[Path]) -> str:
    return "\n".join(f"[{path.name}] {path.read_text()[-_TAIL:]}" for path in outputs)


def _rank(function: str, folder: str, route: str, timeout_s: str) -> None:
    import torchmn
    from tests.all.gpu import work

    work.SHARED["folder"] = Path(folder)
    comm = torchmn.create_communicator(route, timeout_s=torchmn.Timeout(*[float(timeout_s)] * 3))
    getattr(work, function)(comm)
    (Path(folder) / f"done{comm.rank}").touch()
    if function in ENDS_AT_ONCE:
        sys.stdout.flush()
        os._exit(0)  # a stuck GPU and lost peers are not what an orderly end is for
    comm.finalize()


if __name__ == "__main__":
    _rank(*sys.argv[1:])
