"""What is closed is let go of: a communicator does not keep it, nor its memory and connections."""

import gc
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import torchmn
from torchmn.checkpoint import checkpointer as checkpointer_file
from torchmn.comm import Communicator
from torchmn.exchange.schedules import ParameterServer
from torchmn.testing import run_ranks


def num_groups(comm: Communicator) -> int:
    return len(comm.groups)


def collect(comm: Communicator) -> None:
    """On one thread: a collection that another one is in the middle of is none."""
    comm.barrier()
    if comm.rank == 0:
        gc.collect()
    comm.barrier()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_closed_checkpointers(tmp_path: Path, num_ranks: int) -> None:
    def rank_main(comm: Communicator) -> list[object]:
        model = nn.Linear(300, 300)
        before = num_groups(comm)
        kept = []
        for step in range(3):
            checkpointer = torchmn.create_multi_node_checkpointer(comm, tmp_path, "a")
            checkpointer.save(step, {"model": model})
            checkpointer.finish()
            block = weakref.ref(checkpointer._memory._block)
            checkpointer.close()
            kept += [block(), num_groups(comm) - before, weakref.ref(checkpointer)]
            checkpointer.close()
            del checkpointer
        collect(comm)
        return [each() if isinstance(each, weakref.ref) else each for each in kept]

    assert run_ranks(rank_main, num_ranks) == [[None, 0, None] * 3] * num_ranks


def test_an_earlier_exception_of_the_session_ends_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook remembers the last one in ``sys.last_type``, however long ago it was."""
    monkeypatch.setattr(sys, "last_type", ValueError, raising=False)
    monkeypatch.setattr(checkpointer_file, "_GRACE_S", 0.2)

    def rank_main(comm: Communicator) -> int:
        checkpointer = torchmn.create_multi_node_checkpointer(comm, tmp_path, "a")
        if comm.rank == 1:
            time.sleep(2)
        checkpointer.save(1, {"model": nn.Linear(2, 2)})
        comm.finalize()
        return sum(path.name == "step-00000001" for path in (tmp_path / "a").iterdir())

    assert run_ranks(rank_main, 2) == [1, 1]


def test_closed_parameter_servers() -> None:
    def rank_main(comm: Communicator) -> list[object]:
        before = num_groups(comm)
        seen: list[object] = []
        for _ in range(2):
            model = nn.Linear(3, 2)
            schedule = ParameterServer()
            optimizer = torchmn.create_multi_node_optimizer(
                torch.optim.SGD(model.parameters(), 0.1), comm, model, schedule=schedule
            )
            with optimizer.join():
                optimizer.zero_grad()
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
            optimizer.close()
            seen += [weakref.ref(schedule), weakref.ref(schedule._memory[comm.rank])]
            seen.append(num_groups(comm) - before)
            del model, schedule, optimizer
        collect(comm)
        return [each() if isinstance(each, weakref.ref) else each for each in seen]

    assert run_ranks(rank_main, 2) == [[None, None, 0] * 2] * 2
