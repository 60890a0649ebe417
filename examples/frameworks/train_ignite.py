"""Train a perceptron on digits with pytorch-ignite, whose loop is the user's: the usual lines.

    torchmn run -n 2 examples/frameworks/train_ignite.py

Metrics of ignite add up over ranks through torch's default process group, which `idist.Parallel`
makes, and would be those of one rank without it. Changed lines are marked (1) to (3).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy
from torch.utils.data import DataLoader

import torchmn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from datasets import load_images
from models import MLP


def training(local_rank: int, options: argparse.Namespace) -> None:
    """What each rank runs."""
    comm = torchmn.create_communicator()  # (1)
    torch.manual_seed(0)
    images = load_images("digits", None).normalised()
    model = MLP(num_inputs=64, num_units=100).to(comm.device)
    optimizer = torchmn.create_multi_node_optimizer(  # (2), not idist.auto_optim and auto_model
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        comm,
        model,
        codec=options.codec,
        weight="samples",
    )
    train = DataLoader(images.train, batch_sampler=torchmn.GlobalSampler(images.train, comm, 64))
    test = torchmn.scatter_dataset(images.test, comm, force_equal_length=False)  # (3)
    trainer = create_supervised_trainer(
        model, optimizer, torch.nn.functional.cross_entropy, device=comm.device
    )
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()}, device=comm.device)
    trainer.run(train, max_epochs=options.epoch)
    found = evaluator.run(DataLoader(test, batch_size=64)).metrics["accuracy"]
    if comm.rank == 0:
        print(f"accuracy {found:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits with ignite.")
    parser.add_argument("--codec", help="form in which gradients are sent, such as int8")
    parser.add_argument("--epoch", type=int, default=3, help="number of epochs")
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training, parser.parse_args())


if __name__ == "__main__":
    main()
