"""A model on two ranks whose job is struck: killed, stopped, interrupted, forgotten."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.all.processes.runner import Runner
from tests.limits import limit

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

TRAINING = """
import os, signal, sys
import torch
import torchmn
import torchmn.nn.functions as F
from torch.nn.functional import mse_loss

def main():
    comm = torchmn.create_communicator("flat", timeout_s=limit(5))
    how = sys.argv[1]
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for step in range(10**9):
        optimizer.zero_grad()
        if comm.rank == 0:
            delegate = F.send(layer(torch.ones(3, 4)), comm, 1)
            if how != "forgotten" or step < 2:
                delegate.backward()
        else:
            loss = mse_loss(layer(F.recv(comm, 0)), torch.zeros(3, 4))
            if step == 2 and how in ("SIGKILL", "SIGSTOP"):
                os.kill(os.getpid(), getattr(signal, how))
            loss.backward()
        optimizer.step()
        if step == 1:
            print("trains", flush=True)

torchmn.run_main(main)
"""


def test_a_killed_rank_of_a_pipeline_ends_the_job(runner: Runner) -> None:
    done = runner.run("-n", "2", "--backend", "gloo", runner.script(TRAINING), "SIGKILL")
    assert done.returncode == 137, done.stderr
    assert "rank 1 on " in done.stderr
    assert "SIGKILL" in done.stderr
    runner.wait_until_nothing_is_left()


def test_a_stopped_rank_of_a_pipeline_ends_the_job(runner: Runner) -> None:
    began = time.monotonic()
    done = runner.run(
        "-n", "2", "--backend", "gloo", runner.script(TRAINING), "SIGSTOP", limit_s=100
    )
    assert done.returncode != 0
    assert "rank 1" in done.stderr
    assert time.monotonic() - began < limit(90)
    runner.wait_until_nothing_is_left()


def test_a_forgotten_backward_is_named_with_both_lines(runner: Runner) -> None:
    done = runner.run(
        "-n", "2", "--backend", "gloo", runner.script(TRAINING), "forgotten", limit_s=60
    )
    assert done.returncode == 1, done.stderr
    lines = runner.folder.joinpath("script.py").read_text().splitlines()
    sent, received = (
        1 + next(index for index, line in enumerate(lines) if text in line)
        for text in ("F.send(", "F.recv(")
    )
    assert f"recv(rank=0, tag=0) at script.py:{received} in main" in done.stderr
    assert f"of send at script.py:{sent} in main on rank 0" in done.stderr
    runner.wait_until_nothing_is_left()


def test_ctrl_c_ends_all_ranks(runner: Runner) -> None:
    process = runner.start("-n", "2", "--backend", "gloo", runner.script(TRAINING), "train")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)]
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=limit(30))
    assert process.returncode != 0
    runner.wait_until_nothing_is_left()


LAYERS = """
import os, signal, sys, time
import torch
import torchmn

def main():
    comm = torchmn.create_communicator("flat", timeout_s=limit(3))
    kind, how = sys.argv[1:]
    if kind == "batch_norm":
        layer = torchmn.links.MultiNodeBatchNorm1d(3, comm)
    else:
        layer = torchmn.links.ParallelLinear(3, 4, comm)
    for step in range(10**9):
        if step == 3 and comm.rank == 1:
            if how == "forgotten":
                time.sleep(1000)  # forgets the layer
            os.kill(os.getpid(), signal.SIGKILL)
        layer(torch.ones(4, 3, requires_grad=True)).sum().backward()

torchmn.run_main(main)
"""


@pytest.mark.parametrize("kind", ["batch_norm", "parallel"])
def test_a_rank_that_never_calls_a_layer_is_named_within_the_limit(
    runner: Runner, kind: str
) -> None:
    """After the first step the limit is ``timeout_s``, and not that of the first one."""
    script = runner.script(LAYERS)
    done = runner.run("-n", "2", "--backend", "gloo", script, kind, "forgotten", limit_s=60)
    assert done.returncode == 1, done.stderr
    lines = runner.folder.joinpath("script.py").read_text().splitlines()
    line = 1 + next(index for index, text in enumerate(lines) if "forgets the layer" in text)
    summary = done.stderr.splitlines()[-1]
    assert f"has not completed within {limit(3):g} s; rank 1 did not reach it" in summary
    assert f"script.py:{line} in main" in summary
    runner.wait_until_nothing_is_left()


@pytest.mark.parametrize("kind", ["batch_norm", "parallel"])
def test_a_rank_that_is_killed_in_front_of_a_layer(runner: Runner, kind: str) -> None:
    done = runner.run("-n", "2", "--backend", "gloo", runner.script(LAYERS), kind, "SIGKILL")
    assert done.returncode == 137, done.stderr
    assert "rank 1 on " in done.stderr.splitlines()[-1]
    assert "SIGKILL" in done.stderr
    runner.wait_until_nothing_is_left()
