"""A loop around `torchmn.cntk.Trainer` under a launcher: its communicator, kills, errors."""

from __future__ import annotations

import json

import pytest

from tests.all.processes.runner import Runner

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SCRIPT = """
import hashlib, json, os, pathlib, signal, sys
import torch
import torchmn.cntk as C

event, folder = sys.argv[1:]
C.mpi_communicator().barrier()
Communicator = C.Communicator
assert Communicator.rank() == rank and Communicator.num_workers() == 2
comm = C.mpi_communicator()
assert comm.is_main() == (rank == 0)
assert [worker.global_rank for worker in comm.workers()] == [0, 1]
assert comm.current_worker() == comm.workers()[rank]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Linear(64, 3))

    def forward(self, features):
        if event == "raises" and rank == 1 and trainer.num_minibatches == 2:
            raise RuntimeError("no memory for this model")
        return self.layers(features)


model = Model()
learner = C.data_parallel_distributed_learner(
    C.momentum_sgd(
        model.parameters(),
        C.learning_rate_schedule([0.01, 0.005], C.UnitType.sample, 40),
        C.momentum_as_time_constant_schedule(30),
    )
)
trainer = C.Trainer(model, (C.cross_entropy_with_softmax, C.classification_error), learner)
checkpoint, first = pathlib.Path(folder) / "model", 0
if checkpoint.exists():
    first = trainer.restore_from_checkpoint(checkpoint)["next"]
generator = torch.Generator()
for index in range(first, 9):
    generator.manual_seed(index)
    x, y = torch.randn(9, 6, generator=generator), torch.randint(3, (9,), generator=generator)
    if event == "killed" and index == 6 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert trainer.train_minibatch({"features": x[rank::2], "labels": y[rank::2]})
    if index % 2:
        trainer.save_checkpoint(checkpoint, {"next": index + 1})
bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
loss = trainer.previous_minibatch_loss_average
print(json.dumps([first, loss, hashlib.sha256(bits).hexdigest()]))
Communicator.finalize()
"""


def results(output: str) -> list[list[object]]:
    """What the ranks have printed, after the ``[rank]`` before each line."""
    return [json.loads(line.partition(" ")[2]) for line in output.splitlines() if '"]' in line]


def test_a_model_that_raises_on_one_rank_ends_the_job(runner: Runner) -> None:
    done = runner.run("-n", "2", runner.script(SCRIPT), "raises", "folder", limit_s=60)
    assert done.returncode != 0
    assert "RuntimeError: no memory for this model" in done.stderr


def test_killed_and_resumed_bit_for_bit(runner: Runner) -> None:
    script = runner.script(SCRIPT)
    straight = runner.run("-n", "2", script, "none", "straight", limit_s=60)
    assert straight.returncode == 0, straight.stderr
    assert runner.run("-n", "2", script, "killed", "broken", limit_s=60).returncode != 0
    resumed = runner.run("-n", "2", script, "none", "broken", limit_s=60)
    assert resumed.returncode == 0, resumed.stderr
    first, *others = results(straight.stdout) + results(resumed.stdout)
    assert first[0] == 0
    assert [other[0] for other in others] == [0, 6, 6]
    assert all(other[1:] == first[1:] for other in others)
