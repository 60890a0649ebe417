"""A rank of a pipeline that is killed, stopped or fails ends the job, and is named."""

from __future__ import annotations

import os
import subprocess

import psutil
import pytest

from tests.all.processes.runner import Runner
from tests.limits import limit

pytestmark = pytest.mark.processes

HOST = os.uname().nodename
TRAINING = """
import torch
import torchmn
from tests.unit.nn.test_chain_list import batch, line, mse
comm = torchmn.create_communicator("flat", timeout_s=limit(2), first_timeout_s=limit(10))
chain = line(comm, num_microbatches=4)
{extra}
for step in range(100_000):
    chain.zero_grad()
    chain.forward_backward(*batch(8), mse)
    if step == 20:
        print("ready", flush=True)
"""


def begin(
    runner: Runner, backend: str, num_ranks: int = 3, extra: str = ""
) -> subprocess.Popen[str]:
    script = runner.script(TRAINING.format(extra=extra))
    return runner.start("-n", str(num_ranks), "--grace", "1", "--backend", backend, script)


def await_steps(process: subprocess.Popen[str], num_ranks: int = 3) -> None:
    assert process.stdout is not None
    seen = {process.stdout.readline() for _ in range(num_ranks)}
    assert seen == {f"[{rank}] ready\n" for rank in range(num_ranks)}


def script_of(runner: Runner, rank: int) -> psutil.Process:
    for process in runner.processes("bootstrap.py"):
        env = process.environ()
        if int(env.get("RANK") or env["OMPI_COMM_WORLD_RANK"]) == rank:
            return process
    raise AssertionError(f"rank {rank} does not run")


def end_of(process: subprocess.Popen[str], runner: Runner) -> str:
    _, err = process.communicate(timeout=limit(50))
    assert process.returncode, err
    runner.wait_until_nothing_is_left()
    return err


def test_a_rank_that_is_killed(runner: Runner, backend: str) -> None:
    process = begin(runner, backend)
    await_steps(process)
    script_of(runner, 1).kill()
    err = end_of(process, runner)
    assert process.returncode == 137
    assert f"rank 1 on {HOST} was ended by SIGKILL" in err.splitlines()[-1]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_is_stopped(runner: Runner, backend: str, rank: int) -> None:
    process = begin(runner, backend)
    await_steps(process)
    script_of(runner, rank).suspend()
    summary = end_of(process, runner).splitlines()[-1]
    assert f"rank {rank} on {HOST}" in summary
    assert "is stopped by a signal" in summary


def test_a_rank_whose_part_fails(runner: Runner, backend: str) -> None:
    extra = """
if comm.rank == 1:
    def fail(*_):
        if step == 3:
            raise ArithmeticError("this part fails")
    chain.links["1_0"].register_forward_pre_hook(fail)
"""
    err = end_of(begin(runner, backend, extra=extra), runner)
    assert f"rank 1 on {HOST} failed with exit code 1 (ArithmeticError: this part" in err


def test_a_script_that_ends_without_finalize(runner: Runner, backend: str) -> None:
    """The last gradients arrive though their sender exits."""
    text = TRAINING.format(extra="").replace("100_000", "3")
    done = runner.run("-n", "2", "--backend", backend, runner.script(text), limit_s=40)
    assert done.returncode == 0, done.stderr


def test_the_contracts_over_processes(runner: Runner) -> None:
    """Over gloo between processes, as the contract suite runs over threads and MPI."""
    script = runner.script(
        """
import torchmn
from tests.contracts.suites.chain_contracts import check_chains
comm = torchmn.create_communicator("flat", timeout_s=20)
check_chains(comm)
comm.finalize()
"""
    )
    done = runner.run("-n", "3", "--backend", "gloo", script, limit_s=100)
    assert done.returncode == 0, done.stderr
