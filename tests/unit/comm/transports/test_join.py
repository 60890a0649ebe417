"""The rendezvous of ranks, from their launcher's variables."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.all.processes.runner import PYTHON_PATH
from tests.limits import limit
from tests.unit.cluster.test_launcher_env import slurm_step, torchrun
from torchmn.base.torch_private import HashStore
from torchmn.cluster.launcher_env import read_launcher_env
from torchmn.comm.transports import join
from torchmn.errors import TopologyError, UsageError

TORCHRUN = torchrun(1, 4, local=1, per_node=2, agents=2)
RANK = f"""
import json, sys, torch, torchmn
comm = torchmn.create_communicator("naive", timeout_s={limit(30)})
print(json.dumps([comm.rank, comm.size, float(comm.allreduce(torch.ones(1)))]))
"""


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1"])
def test_a_loopback_address_is_rejected_on_several_hosts(address: str) -> None:
    place = read_launcher_env(TORCHRUN)
    assert place is not None
    with pytest.raises(TopologyError, match=f"MASTER_ADDR={address} is a loopback address"):
        join._raise_if_address_is_local(place, address)


def test_a_loopback_address_is_accepted_on_one_host() -> None:
    place = read_launcher_env({**TORCHRUN, "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"})
    assert place is not None
    join._raise_if_address_is_local(place, "127.0.0.1")


@pytest.mark.parametrize("names", ["eth77", "lo,eth77", "lo, lo"])
def test_interfaces_that_this_host_does_not_have(
    monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    """gloo's own error looked like that of a lost rank, and the job like one that hangs."""
    place = read_launcher_env(TORCHRUN)
    assert place is not None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    with pytest.raises(UsageError, match=r"has no interface '(eth77| lo)', but .*lo"):
        join._own_address(place, "192.0.2.1", HashStore())  # type: ignore[arg-type]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo:1")
    assert join._own_address(place, "192.0.2.1", HashStore()) is None  # type: ignore[arg-type]


def start_ranks(tmp_path: Path, size: int, step: str) -> list[subprocess.Popen[str]]:
    """With what srun sets for a step on one node, by its manual."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    base = {name: text for name, text in os.environ.items() if not name.startswith("MASTER_")}
    base |= {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "n1"}
    return [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=base | slurm_step(rank, size, local=rank, step=step) | job,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


@pytest.mark.processes
def test_two_steps_of_one_job_find_their_own_ranks_without_a_port(tmp_path: Path) -> None:
    """srun's variables without srun: the rendezvous needs nothing else of it."""
    worlds = [start_ranks(tmp_path, 2, step) for step in ("0", "1")]
    for processes in worlds:
        found = []
        for process in processes:
            out, err = process.communicate(timeout=limit(50))
            assert process.returncode == 0, err
            found.append(json.loads(out))
        assert found == [[0, 2, 2.0], [1, 2, 2.0]]


@pytest.mark.processes
def test_a_port_in_use(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import torchmn\n"
        "torchmn.run_main(lambda: torchmn.create_communicator('naive', timeout_s=10))\n"
    )
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        rank_0 = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": PYTHON_PATH, **rank_0},
            capture_output=True,
            text=True,
            timeout=limit(50),
        )
    assert done.returncode != 0
    assert f"Rank 0 could not listen on 127.0.0.1:{port}" in done.stderr
    assert "choose another MASTER_PORT" in done.stderr
    assert "Traceback" not in done.stderr
