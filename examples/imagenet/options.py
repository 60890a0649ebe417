"""The options of train_imagenet.py, and its two recipes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import SGD, Optimizer

from torchmn.train.large_batch import (
    BatchSchedule,
    Cosine,
    GlobalBatch,
    GradualWarmup,
    LinearScaling,
    MultiStep,
    weight_decay_groups,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models.resnet50 import LAYOUTS

WARM_UP_EPOCHS = 5
BASE_RATE, BASE_BATCH = 0.1, 256


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the network learns."""

    epochs: int
    batchsize: int
    """Photos of a worker in one step."""
    is_cosine: bool
    label_smoothing: float
    bf16: bool


RECIPES = {
    # The report of December 2017: 100 epochs, 32 per GPU, a tenth of the rate every 30 epochs. It
    # does not state the rate, warm-up, momentum and decay, which are those of Goyal et al. 2017.
    "document": Recipe(
        epochs=100,
        batchsize=32,
        is_cosine=False,
        label_smoothing=0.0,
        bf16=False,
    ),
    # He et al. 2018, Bag of Tricks, arXiv 1812.01187: 120 epochs, cosine, smoothing.
    "modern": Recipe(
        epochs=120,
        batchsize=128,
        is_cosine=True,
        label_smoothing=0.1,
        bf16=True,
    ),
}


def parse_options() -> argparse.Namespace:
    """Read the command line; what is not given is the recipe's."""
    parser = argparse.ArgumentParser(description="Train ResNet-50 on ImageNet with many workers.")
    add = parser.add_argument
    add("data", type=Path, help="folder of train and val: class folders, map files or shards")
    add("--recipe", default="modern", choices=RECIPES, help="default: modern")
    add("--epochs", type=int, help="number of epochs; default: the recipe's")
    add("--batchsize", type=int, help="photos of a worker in one pass; default: the recipe's")
    add("--global-batch", type=int, help="photos of a step; default: one pass of each worker")
    add("--learnrate", type=float, default=BASE_RATE, help=f"rate for {BASE_BATCH} photos per step")
    add("--bf16", action=argparse.BooleanOptionalAction, help="default: the recipe's")
    add("--batch-norm", default="local", choices=("local", "all"), help="photos of a pass, or step")
    add("--ema", type=float, default=0.0, help="evaluate averaged weights: decay per step, 0.9999")
    add("--compile", action="store_true", help="use torch.compile")
    add("--arch", default="resnet50", choices=LAYOUTS, help="default: resnet50")
    add("--model-width", type=int, default=64, help="channels of the first stage")
    add("--image-size", type=int, default=224, help="pixels of a side")
    add("--workers", type=int, default=4, help="processes of each rank that read photos")
    add("--seed", type=int, default=0, help="seed of weights, order and augmentation")
    add("--communicator", default="auto", help="route of the mean of gradients")
    add("--cpu", action="store_true", help="use no GPU")
    add("--out", type=Path, default=Path("result"), help="folder of checkpoints, log and weights")
    add("--save-steps", type=int, default=1000, help="steps between two checkpoints")
    add("--log-steps", type=int, default=20, help="steps between two lines of the log")
    add("--margin", type=float, default=120.0, help="seconds to save in before the job's limit")
    add("--check", type=float, default=1.0, help="seconds between two checks for that limit")
    add("--weights", type=Path, help="begin with these, as torchvision's")
    add("--evaluate", action="store_true", help="evaluate only")
    options = parser.parse_args()
    recipe = RECIPES[options.recipe]
    for name in ("epochs", "batchsize", "bf16"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(recipe, name))
    return options


def build_optimizer(options: argparse.Namespace, model: nn.Module) -> SGD:
    """SGD with momentum; no weight decay on normalization (Goyal et al. 2017) and biases."""
    return SGD(weight_decay_groups(model, 1e-4), lr=options.learnrate, momentum=0.9)


def build_schedule(
    options: argparse.Namespace, optimizer: Optimizer, batch: GlobalBatch
) -> BatchSchedule:
    """Linear scaling and a warm-up, then steps or a cosine."""
    schedule: BatchSchedule = LinearScaling(optimizer, batch, base_batch=BASE_BATCH)
    warm_up = min(WARM_UP_EPOCHS, options.epochs / 2)
    schedule = GradualWarmup(schedule, batch, warm_up)
    if RECIPES[options.recipe].is_cosine:
        return Cosine(schedule, batch, options.epochs, begin=warm_up)
    return MultiStep(schedule, batch, [30, 60, 90])
