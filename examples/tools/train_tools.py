"""A loop with torch.compile, torchmetrics and a tracker of one's choice, on many workers.

    torchmn run -n 2 examples/tools/train_tools.py --tracker tensorboard

Compile the model before or after the optimizer is wrapped. A tracker belongs to one rank. A metric
of torchmetrics adds up over ranks through torch's default process group, which torchmn does not
make, and would be that of one rank: it is given torchmn's exchange here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

import torchmn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from datasets import load_images
from models import MLP


def tracker(name: str, folder: str) -> Callable[[dict[str, float], int], None]:
    """A function that logs numbers of a step, on the rank that calls this."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(folder)

        def log(values: dict[str, float], step: int) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, step)
            writer.flush()

        return log
    if name == "mlflow":
        import mlflow

        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        mlflow.start_run()
        return lambda values, step: mlflow.log_metrics(values, step=step)
    if name == "wandb":
        import wandb

        run = wandb.init(mode="offline", dir=folder)
        return lambda values, step: run.log(values, step=step)
    return lambda values, step: print(f"step {step}: {values}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits, with tools.")
    parser.add_argument("--tracker", default="print", help="tensorboard, mlflow, wandb or print")
    parser.add_argument("--out", default="result", help="folder of the tracker")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--epoch", type=int, default=3, help="number of epochs")
    options = parser.parse_args()
    comm = torchmn.create_communicator()
    torch.manual_seed(0)
    images = load_images("digits", None).normalised()
    model: Any = MLP(num_inputs=64, num_units=100).to(comm.device)
    if options.compile:
        model = torch.compile(model)
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), comm, model, weight="samples"
    )
    train = DataLoader(images.train, batch_sampler=torchmn.GlobalSampler(images.train, comm, 64))
    test = torchmn.scatter_dataset(images.test, comm, force_equal_length=False)
    over_ranks = torchmn.frameworks.torchmetrics_options(comm)
    accuracy = MulticlassAccuracy(10, average="micro", **over_ranks).to(comm.device)
    confusion = MulticlassConfusionMatrix(10, **over_ranks).to(comm.device)
    log = tracker(options.tracker, options.out) if comm.rank == 0 else None
    for epoch in range(options.epoch):
        for inputs, labels in train:
            optimizer.zero_grad()
            inputs, labels = inputs.to(comm.device), labels.to(comm.device)
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        with torch.no_grad():
            for inputs, labels in DataLoader(test, batch_size=64):
                inputs, labels = inputs.to(comm.device), labels.to(comm.device)
                logits = model(inputs)
                accuracy.update(logits, labels)
                confusion.update(logits, labels)
        found = {"accuracy": float(accuracy.compute()), "number": int(confusion.compute().sum())}
        accuracy.reset()
        confusion.reset()
        if log is not None:
            log(found, epoch)
    if comm.rank == 0:
        print(f"accuracy {found['accuracy']:.4f} of {found['number']:.0f}")


if __name__ == "__main__":
    main()
