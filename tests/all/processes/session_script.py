"""A session under torchmn run, which a signal ends where an argument says."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import torchmn
import torchmn.cntk as C
from tests.unit.cntk.sessions import Line, is_far, source, squared


class Strike(C.ProgressWriter):
    """Sends this process a signal after a number of minibatches and the first checkpoint."""

    def __init__(self, name: str, after: int, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._signal = signal.Signals[name]
        self._left = after

    def on_training_update_end(self) -> None:
        self._left -= 1
        if self._left == 0:
            while not any(self._folder.glob("step-*")):  # a thread writes it
                time.sleep(0.01)
            os.kill(os.getpid(), self._signal)
        # Ranks synchronize about once a second, by the time that steps took before. So that this is
        # at most 50 minibatches after the signal, each of them takes this long from the first.
        time.sleep(0.02)


def main(folder: str, learner: str, result: str, name: str, after: int) -> None:
    C.mpi_communicator("flat")  # which quantizes between the ranks of a host, too
    rank = C.Communicator.rank()
    model = Line()
    local = C.momentum_sgd(
        model.parameters(),
        C.learning_rate_schedule(0.001, C.UnitType.sample),
        C.momentum_as_time_constant_schedule(10),
    )
    made: Any = {
        "1bit": lambda: C.data_parallel_distributed_learner(local, num_quantization_bits=1),
        "block": lambda: C.block_momentum_distributed_learner(local, 70),
    }[learner]()
    writers: list[C.ProgressWriter] = [C.ProgressPrinter(freq=25, num_epochs=8)]
    if name and rank == C.Communicator.num_workers() - 1:
        writers.append(Strike(name, after, Path(folder, "model")))
    trainer = C.Trainer(model, (squared, is_far), made, writers)
    train = source(200, max_sweeps=8, randomize=True)
    found = C.training_session(
        trainer,
        train,
        7,
        {"x": train.streams.x, "y": train.streams.y},
        progress_frequency=200,
        checkpoint_config=C.CheckpointConfig(f"{folder}/model", 100),
        cv_config=C.CrossValidationConfig(source(20, seed=1), 300),
        test_config=C.TestConfig(source(30, seed=2)),
    ).train()
    assert found is not None
    weight = model.weight.detach()
    torch.save((weight, found.error, trainer.num_minibatches), f"{result}.rank{rank}")
    C.Communicator.finalize()


if __name__ == "__main__":
    torchmn.run_main(lambda: main(*sys.argv[1:5], int(sys.argv[5])))
