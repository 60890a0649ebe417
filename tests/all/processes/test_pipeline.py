"""A rank of a pipeline or of a layer over ranks that is stopped or forgets a call is named."""

import pytest

from tests.all.processes.runner import Runner
from tests.all.processes.test_stopped import HOST, scripts
from tests.limits import limit

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

TRAINING = """
import torch
import torchmn
from tests.unit.nn.test_chain_list import batch, line, mse
comm = torchmn.create_communicator("flat", timeout_s=torchmn.Timeout(limit(2), limit(2), limit(10)))
chain = line(comm, num_microbatches=4)
for step in range(100_000):
    chain.zero_grad()
    chain.forward_backward(*batch(8), mse)
    if step == 20:
        print("ready", flush=True)
"""


def test_a_rank_that_is_stopped(runner: Runner, backend: str) -> None:
    process = runner.start("-n", "3", "--grace", "1", "--backend", backend, runner.script(TRAINING))
    assert process.stdout is not None
    seen = {process.stdout.readline() for _ in range(3)}
    assert seen == {f"[{rank}] ready\n" for rank in range(3)}
    scripts(runner)[1].suspend()
    _, err = process.communicate(timeout=limit(50))
    assert process.returncode, err
    summary = err.splitlines()[-1]
    assert f"rank 1 on {HOST}" in summary
    assert "is stopped by a signal" in summary
    runner.wait_until_nothing_is_left()


def test_a_script_that_ends_without_finalize(runner: Runner, backend: str) -> None:
    """The last gradients arrive though their sender exits."""
    text = TRAINING.replace("100_000", "3")
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


def place_of(runner: Runner, text: str) -> str:
    """The place of the only line of the script with this text, as messages name it."""
    lines = (runner.folder / "script.py").read_text().splitlines()
    [number] = [number for number, line in enumerate(lines, start=1) if text in line]
    return f"script.py:{number} in main"


FORGOTTEN = """
import time
import torch
import torchmn
import torchmn.nn.functions as F

def main():
    comm = torchmn.create_communicator("flat", timeout_s=limit(5))
    layer = torch.nn.Linear(4, 4)
    for step in range(10**9):
        if comm.rank == 0:
            if step == 3:
                time.sleep(limit(2))  # rank 1 waits in its backward, and is the first to give up
            delegate = F.send(layer(torch.ones(3, 4)), comm, 1)
            if step < 2:
                delegate.backward()
        else:
            layer(F.recv(comm, 0)).sum().backward()

torchmn.run_main(main)
"""


def test_a_forgotten_backward_is_named_with_both_lines(runner: Runner) -> None:
    done = runner.run("-n", "2", "--backend", "gloo", runner.script(FORGOTTEN), limit_s=60)
    assert done.returncode == 1, done.stderr
    assert f"recv(rank=0, tag=0) at {place_of(runner, 'F.recv(')}" in done.stderr
    assert f"of send at {place_of(runner, 'F.send(')} on rank 0" in done.stderr
    runner.wait_until_nothing_is_left()


LAYERS = """
import sys, time
import torch
import torchmn

def main():
    comm = torchmn.create_communicator("flat", timeout_s=limit(3))
    if sys.argv[1] == "batch_norm":
        layer = torchmn.links.MultiNodeBatchNorm1d(3, comm)
    else:
        layer = torchmn.links.ParallelLinear(3, 4, comm)
    for step in range(10**9):
        if step == 3 and comm.rank == 1:
            time.sleep(1000)  # forgets the layer
        layer(torch.ones(4, 3, requires_grad=True)).sum().backward()

torchmn.run_main(main)
"""


@pytest.mark.parametrize("kind", ["batch_norm", "parallel"])
def test_a_rank_that_never_calls_a_layer_is_named_within_the_limit(
    runner: Runner, kind: str
) -> None:
    """After the first step the limit is ``timeout_s``, and not that of the first one."""
    done = runner.run("-n", "2", "--backend", "gloo", runner.script(LAYERS), kind, limit_s=60)
    assert done.returncode == 1, done.stderr
    summary = done.stderr.splitlines()[-1]
    assert f"has not completed within {limit(3):g} s; rank 1 did not reach it" in summary
    assert place_of(runner, "forgets the layer") in summary
    runner.wait_until_nothing_is_left()
