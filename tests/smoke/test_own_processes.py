"""Processes that a script starts itself: ranks of its own group, or children that are no ranks."""

import pytest

from tests.all.processes.runner import Runner, free_port
from tests.all.processes.test_run import lines_of
from tests.limits import limit

pytestmark = pytest.mark.processes

SPAWN = r"""
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchmn


def setup(rank, world_size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
    if sys.argv[2] == "init":
        dist.init_process_group("gloo", rank=rank, world_size=world_size)


def main(rank, world_size):
    setup(rank, world_size)
    comm = torchmn.create_communicator()
    found = [comm.rank, comm.size, comm.intra_rank, comm.intra_size, sum(comm.allgather_obj(rank))]
    comm.finalize()
    if dist.is_initialized():  # it is still the script's
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        found.append(int(total))
        dist.destroy_process_group()
    os.write(1, f"{' '.join(map(str, found))}\n".encode())  # at once, as others write there too


if __name__ == "__main__":
    mp.spawn(main, args=(int(sys.argv[3]),), nprocs=int(sys.argv[3]))
"""


def spawned(runner: Runner, mode: str, number: int) -> tuple[list[str], str]:
    (runner.folder / "spawn.py").write_text(SPAWN)
    process = runner.start_python("spawn.py", str(free_port()), mode, str(number))
    out, err = process.communicate(timeout=limit(60))
    assert process.returncode == 0, err
    return sorted(out.splitlines()), err


def test_ranks_of_the_ddp_tutorial_are_one_job(runner: Runner) -> None:
    lines, err = spawned(runner, "init", 3)
    assert lines == ["0 3 0 3 3 6", "1 3 1 3 3 6", "2 3 2 3 3 6"]
    assert err.count("The ranks hash strings differently") == 1
    assert "rank 0 of 1" not in err


def test_children_with_an_address_and_no_rank_are_warned(runner: Runner) -> None:
    lines, err = spawned(runner, "alone", 2)
    assert lines == ["0 1 0 1 0", "0 1 0 1 1"]
    assert err.count("rank 0 of 1: MASTER_ADDR=localhost is set, but it has no rank") == 2
    assert "torch.distributed.init_process_group(rank=, world_size=)" in err


LABELS = ["cat", "dog", "bird", "cow", "horse", "sheep", "goat", "pig"]
STARTS_PROGRAM = f"""
import subprocess, sys
import torchmn
if sys.argv[1:] == ["evaluate"]:
    print(torchmn.create_communicator().size)
else:
    print(*set({LABELS!r}))
    comm = torchmn.create_communicator()
    if rank == 0:
        done = subprocess.run(
            [sys.executable, "script.py", "evaluate"], capture_output=True, text=True
        )
        print(done.returncode, done.stderr.strip().splitlines()[-1])
    comm.barrier()
"""


def test_sets_have_one_order_and_the_program_of_a_rank_is_no_rank(runner: Runner) -> None:
    script = runner.script(STARTS_PROGRAM)
    done = runner.run("-n", "2", "--backend", "gloo", script, limit_s=60, PYTHONHASHSEED="random")
    assert done.returncode == 0, done.stderr
    order, told = lines_of(done.stdout, 0)
    assert lines_of(done.stdout, 1) == [order]
    assert sorted(order.split()) == sorted(LABELS)
    assert told.startswith("1 torchmn.errors.UsageError: Process ")
    assert "was started by rank 0 of a job" in told
    assert "hash strings differently" not in done.stderr
