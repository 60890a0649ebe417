"""Processes that die, hang or leave: the others continue, or end with a message in time."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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

rank, size, folder, event = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
servers = "all" if sys.argv[5] == "all" else int(sys.argv[5])
LIMIT_S = 4.0
torch.set_num_threads(1)


def main():
    store = FileStore(folder + "/store", size)
    transport = TorchDistributedTransport(store, rank, size, timeout_s=30)
    comm = torchmn.create_communicator(
        "flat", transport=transport, topology=Topology.blocks([size]), timeout_s=LIMIT_S
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
            with open(folder + "/at", "w") as file:
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
        with open(folder + "/at") as file:
            print("after", time.time() - float(file.read()))
        raise

torchmn.run_main(with_message)
"""


class Job:
    def __init__(self, tmp_path: Path, size: int, event: str, servers: int | str) -> None:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.replace("LIMIT_S = 4.0", f"LIMIT_S = {limit(4)}"))
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="default")
        self.processes = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(size), str(tmp_path), event, str(servers)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def outcome(self, rank: int) -> tuple[int, str, str]:
        """Exit status, output, errors."""
        out, err = self.processes[rank].communicate(timeout=limit(150))
        return self.processes[rank].returncode, out, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    jobs: list[Job] = []

    def make(size: int, event: str, servers: int | str) -> Job:
        jobs.append(Job(tmp_path, size, event, servers))
        return jobs[-1]

    yield make
    for process in jobs[0].processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_others_continue_without_a_worker_that_dies(start) -> None:
    job = start(4, "dies", 1)
    outcomes = {rank: job.outcome(rank) for rank in (0, 2, 3)}
    for status, _, err in outcomes.values():
        assert status == 0, err
        assert "Traceback" not in err
        assert err.count("rank 1 is lost. Training continues without it.") == 1
    first = outcomes[0][1].splitlines()[0]
    assert first.endswith("lost [1]")
    assert all(out.splitlines()[0] == first for _, out, _ in outcomes.values())


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ("dies", "Its part of the parameters is lost"),
        ("leaves", "has ended its training"),
        ("hangs", f"(within|for) {limit(4):g} s"),
    ],
)
def test_all_end_with_a_message_where_they_cannot(start, event: str, message: str) -> None:
    job = start(3, event, "all")
    for rank in (0, 2):
        status, out, err = job.outcome(rank)
        assert status == 1, err
        assert "Traceback" not in err
        assert re.search(f"torchmn: .*({message})", err), err
        # The limit, once for what it waits for and once for a message that may be under way.
        assert float(out.split("after ")[1].split()[0]) < limit(9)
