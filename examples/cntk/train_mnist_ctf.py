"""Train a small network on MNIST in CNTK's text format, until it no longer improves.

    python examples/cntk/make_data.py mnist --download --data-root archives --out data
    torchmn run -n 2 examples/cntk/train_mnist_ctf.py -datadir data -m 128

Every epoch is evaluated on the test images, and training ends when the error has not become smaller
for two epochs.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, nn

import torchmn
import torchmn.cntk as C


class Network(nn.Module):
    """Two hidden layers on 28 x 28 pixels of 0 to 255."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 200), nn.ReLU(), nn.Linear(200, 10)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Logits."""
        return self.layers(features / 256)


class Patience:
    """Ends training when the error has not become smaller for some evaluations."""

    def __init__(self, num: int) -> None:
        self.num = self.left = num
        self.best = float("inf")

    def __call__(self, index: int, error: float, num_samples: int, num_minibatches: int) -> bool:
        """Whether to continue."""
        self.left = self.num if error < self.best else self.left - 1
        self.best = min(self.best, error)
        return self.left > 0


def create_source(folder: str, part: str, **options: int) -> C.io.MinibatchSource:
    path = os.path.join(folder, f"{part}-28x28_cntk_text.txt")
    streams = C.io.StreamDefs(
        features=C.io.StreamDef(field="features", shape=784),
        labels=C.io.StreamDef(field="labels", shape=10),
    )
    return C.io.MinibatchSource(C.io.CTFDeserializer(path, streams), **options)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on MNIST.")
    add = parser.add_argument
    add("-datadir", default="data", help="folder of the text files")
    add("-outputdir", default="models", help="folder of the checkpoints")
    add("-n", "--num_epochs", type=int, default=20, help="epochs at most")
    add("-m", "--minibatch_size", type=int, default=64, help="images of all ranks in a minibatch")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Network().to(C.mpi_communicator().ranks.device)
    learner = C.data_parallel_distributed_learner(
        C.momentum_sgd(
            model.parameters(),
            C.learning_rate_schedule(0.001, C.UnitType.sample),
            C.momentum_as_time_constant_schedule(600),
        )
    )
    criterion = C.cross_entropy_with_softmax, C.classification_error
    printer = C.ProgressPrinter(tag="Training", num_epochs=options.num_epochs)
    trainer = C.Trainer(model, criterion, learner, [printer])

    train = create_source(options.datadir, "Train", max_sweeps=options.num_epochs)
    test = create_source(options.datadir, "Test", max_sweeps=1, randomize=False)
    every_epoch = (1, C.DataUnit.sweep)
    C.training_session(
        trainer,
        train,
        options.minibatch_size,
        {"features": train.streams.features, "labels": train.streams.labels},
        progress_frequency=every_epoch,
        checkpoint_config=C.CheckpointConfig(
            os.path.join(options.outputdir, "MNIST"), frequency=every_epoch
        ),
        cv_config=C.CrossValidationConfig(
            test, frequency=every_epoch, minibatch_size=1000, callback=Patience(2)
        ),
    ).train()
    C.Communicator.finalize()


if __name__ == "__main__":
    torchmn.run_main(main)
