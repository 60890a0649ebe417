"""Processes that die, hang or leave: the others continue, or end with a message in time."""

import re
import subprocess

import pytest

from tests.all.processes.runner import Runner, finish
from tests.limits import limit

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SCRIPT = """
import os, signal, sys, time
import torch
from torch.distributed import FileStore
import torchmn
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.exchange.schedules import ParameterServer
from torchmn.cluster import Topology

size, event, servers = int(sys.argv[1]), sys.argv[2], sys.argv[3]
servers = servers if servers == "all" else int(servers)
torch.set_num_threads(1)


def main():
    store = FileStore("store", size)
    transport = TorchDistributedTransport(store, rank, size, timeout_s=30)
    comm = torchmn.create_communicator(
        "flat", transport=transport, topology=Topology.blocks([size]), timeout_s=limit(4)
    )
    model = torch.nn.Linear(30, 4)
    inner = torch.optim.SGD(model.parameters(), 0.01)
    schedule = ParameterServer(servers, max_staleness=2)
    optimizer = torchmn.create_multi_node_optimizer(inner, comm, model, schedule=schedule)
    for step in range(0 if optimizer.schedule.traits.serves else 12):
        optimizer.zero_grad()
        model(torch.ones(3, 30)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
        if step == 4 and rank == 1:
            with open("at", "w") as file:
                file.write(str(time.time()))
            if event == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if event == "hangs":
                os.kill(os.getpid(), signal.SIGSTOP)
            if event == "leaves":
                return
    optimizer.flush()
    print("sum", model.weight.sum().item(), "lost", sorted(schedule.lost))
    print(len(optimizer.state_dict()["param_groups"]))


def with_message():
    try:
        main()
    except Exception as error:
        with open("at") as file:
            print("after", time.time() - float(file.read()))
        raise

torchmn.run_main(with_message)
"""


def outcomes(
    runner: Runner, size: int, event: str, servers: str
) -> list[subprocess.CompletedProcess[str]]:
    """How all ranks but rank 1 have ended."""
    words = (runner.script(SCRIPT), str(size), event, servers)
    env = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    first, faulty, *others = runner.start_ranks(size, *words, **env)
    done = [finish(rank, 150) for rank in (first, *others)]
    faulty.kill()
    faulty.wait(limit(20))
    return done


def test_others_continue_without_a_worker_that_dies(runner: Runner) -> None:
    done = outcomes(runner, 4, "dies", "1")
    for each in done:
        assert each.returncode == 0, each.stderr
        assert "Traceback" not in each.stderr
        assert each.stderr.count("rank 1 is lost. Training continues without it.") == 1
        assert each.stdout.splitlines()[0] == done[0].stdout.splitlines()[0]
    assert done[0].stdout.splitlines()[0].endswith("lost [1]")


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ("dies", "Its part of the parameters is lost"),
        ("leaves", "has ended its training"),
        ("hangs", f"(within|for) {limit(4):g} s"),
    ],
)
def test_all_end_with_a_message_where_they_cannot(runner: Runner, event: str, message: str) -> None:
    done = outcomes(runner, 3, event, "all")
    named = [re.search(f"torchmn: .*({message})", each.stderr) for each in done]
    assert any(named), [each.stderr for each in done]
    for is_named, each in zip(named, done, strict=True):
        assert each.returncode == 1, each.stderr
        assert "Traceback" not in each.stderr
        # One that is late finds the other one gone, and says that this is not the cause.
        assert is_named or "follow-up: torchmn: " in each.stderr, each.stderr
        # The limit, once for what it waits for and once for a message that may be under way.
        assert float(each.stdout.split("after ")[1].split()[0]) < limit(9)
