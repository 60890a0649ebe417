"""One unchanged script under every launcher that is here: Open MPI, torchrun, torchmn run, none."""

import json
import sys
from pathlib import Path

import pytest

from tests.all.processes.runner import AS_ROOT, Runner, mpirun_python, run

pytestmark = pytest.mark.processes

SCRIPT = """
import argparse, dataclasses, datetime, enum, json, pathlib, sys
import torch, torchmn

class Mode(enum.Enum):
    TRAIN = 1

@dataclasses.dataclass
class Config:
    out: pathlib.Path
    args: argparse.Namespace
    mode: Mode = Mode.TRAIN
    began: datetime.date = datetime.date(2020, 1, 2)

comm = torchmn.create_communicator(transport=sys.argv[2])
config = Config(pathlib.Path("out"), argparse.Namespace(lr=0.1))
assert comm.bcast_obj(config if comm.rank == 0 else None) == config
total = int(comm.allreduce(torch.tensor(comm.rank + 1)))
place = [comm.rank, comm.size, comm.intra_rank, comm.intra_size, comm.inter_rank, comm.inter_size]
with open(f"{sys.argv[1]}/{comm.rank}.json", "w") as file:
    json.dump([place, comm.world.transport.name, total], file)
comm.finalize()
"""
PYTHON = sys.executable


def launcher(name: str) -> list[str]:
    if name == "mpirun":
        return mpirun_python(2)
    if name == "torchrun":
        return [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if name == "torchmn run":
        return [PYTHON, "-m", "torchmn", "run", "-n", "2", "--backend", "gloo"]
    return [PYTHON]


@pytest.mark.parametrize(
    ("name", "asked", "size", "carries"),
    [
        ("mpirun", "auto", 2, "mpi"),
        ("mpirun", "torch", 2, "torch.distributed"),  # rank 0's port becomes known over MPI
        ("torchrun", "auto", 2, "torch.distributed"),
        ("torchmn run", "auto", 2, "torch.distributed"),
        ("none", "auto", 1, "torch.distributed"),
    ],
)
def test_same_script(tmp_path: Path, name: str, asked: str, size: int, carries: str) -> None:
    script = tmp_path / "a script.py"
    script.write_text(SCRIPT)
    command = (*launcher(name), script, tmp_path, asked)
    done = run(*command, cwd=tmp_path, OMP_NUM_THREADS="1", **AS_ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    total = size * (size + 1) // 2
    assert found == [[[r, size, r, size, 0, 1], carries, total] for r in range(size)]


LEAVES_ITS_COMMUNICATOR_OPEN = """
import atexit, torch
atexit.register(lambda: print("groups", kept.world.transport._gloo, flush=True))  # runs last
import torchmn
kept = torchmn.create_communicator("naive")
kept.allreduce(torch.ones(1))
"""


def test_groups_are_closed_before_python_takes_itself_apart(tmp_path: Path) -> None:
    """gloo's threads end the process with SIGABRT otherwise, now and then."""
    (tmp_path / "script.py").write_text(LEAVES_ITS_COMMUNICATOR_OPEN)
    done = run(*launcher("torchmn run"), "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] groups None", "[1] groups None"]


PLAIN = """
import os
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")  # env://
local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
assert dist.is_torchelastic_launched() and os.environ["GROUP_RANK"] == "0", local
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(3, 1))
model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
print(dist.get_rank(), dist.get_world_size(), *local, *model.module.weight.grad[0].tolist())
dist.destroy_process_group()
"""


def test_script_of_torch_distributed_alone(runner: Runner, backend: str) -> None:
    done = runner.run("-n", "2", "--backend", backend, runner.script(PLAIN), limit_s=60)
    assert done.returncode == 0, done.stderr
    lines = [f"[{rank}] {rank} 2 {rank} 2 0.5 0.5 0.5" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == lines
