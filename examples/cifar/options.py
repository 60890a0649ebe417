"""What the three scripts of this folder share: their options, data and networks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from torchmn import Communicator
from torchmn.errors import UsageError
from torchmn.train import Classifier

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from datasets import ImageData, load_images
from models import VGG, SmallCNN

NETWORKS = ("vgg", "small")


def parse_options(description: str, *, communicator: str | None = None) -> argparse.Namespace:
    """Read the command line; ``communicator`` is the default of an option that not all have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--epoch", type=int, default=4, help="number of epochs")
    add("--batchsize", type=int, default=32, help="images per worker and step")
    add("--learnrate", type=float, default=0.05, help="learning rate of SGD with momentum 0.9")
    add("--gpus", type=int, default=torch.cuda.device_count(), help="GPUs to use, 0 for none")
    add("--out", default="result", help="folder for log, plot and snapshots")
    add("--no_snapshot", action="store_true", help="write no snapshots")
    add("--dataset", default="cifar10", choices=["cifar10", "digits", "mnist"], help="images")
    add("--data-root", help="folder or file that has them")
    add("--download", action="store_true", help="download them if they are missing")
    add("--model", default="vgg", choices=NETWORKS, help="network")
    add("--seed", type=int, default=0, help="seed of parameters, dropout and the order of images")
    if communicator is not None:
        add("--communicator", default=communicator, help="route of the mean")
        add("--checkpoint", help="folder of checkpoints: resume from it and save after every epoch")
    options = parser.parse_args()
    for name in ("epoch", "batchsize"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} is {getattr(options, name)}. It must be at least 1.")
    return options


def load(options: argparse.Namespace, comm: Communicator | None = None) -> ImageData:
    """The images, normalized; 32 x 32 in three colours for VGG. Prints where they are from."""
    images = load_images(
        options.dataset, options.data_root, download=options.download, comm=comm
    ).normalised()
    if comm is None or comm.rank == 0:
        title = {"cifar10": "CIFAR10", "mnist": "MNIST"}.get(images.name, images.name)
        print(f"Using {title} dataset: {images.path or 'scikit-learn'}", flush=True)
    return images.resized(32, channels=3) if options.model == "vgg" else images.resized(32)


def raise_if_one_image(options: argparse.Namespace, num_images: int, num_workers: int) -> None:
    """The last linear layers of VGG cannot normalize over a batch of one image."""
    rest = num_images % (options.batchsize * num_workers)
    if options.model == "vgg" and 1 in (rest // num_workers, -(-rest // num_workers)):
        raise UsageError(
            f"The last step of an epoch has {rest} images for {num_workers} workers, so one gets a "
            "single image, which VGG cannot train on. Choose another --batchsize."
        )


def build(options: argparse.Namespace, images: ImageData) -> Classifier:
    """The network with its loss; the same on all ranks for the same seed."""
    torch.manual_seed(options.seed)
    channels, size, _ = images.shape
    network: nn.Module
    if options.model == "vgg":
        network = VGG(images.num_classes, channels)
    else:
        network = SmallCNN(images.num_classes, channels, size)
    return Classifier(network)


def build_optimizer(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, and weight decay on all parameters, as in Chainer's example."""
    return torch.optim.SGD(
        model.parameters(), lr=options.learnrate, momentum=0.9, weight_decay=5e-4
    )


def print_throughput(num_images: int, elapsed_s: float) -> None:
    """The last line: images per second of training, validation included."""
    print(f"Throughput: {num_images / elapsed_s} [images/sec.] ({num_images} / {elapsed_s})")
