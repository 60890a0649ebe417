"""Train VGG on CIFAR-10 with one worker: where you start.

    python examples/cifar/train_cifar.py --download --data-root data

`train_cifar_multi_node.py` is this script for many ranks.
"""

from __future__ import annotations

import torch
from options import (
    build,
    build_optimizer,
    load,
    parse_options,
    print_throughput,
    raise_if_one_image,
)
from pytorch_pfn_extras.training.extensions import Evaluator
from torch.utils.data import DataLoader

import torchmn
from torchmn.errors import UsageError
from torchmn.train import extend_with_reports
from torchmn.train.evaluation import batch_to


def main() -> None:
    options = parse_options("Train a network on small images with one worker.")
    comm = torchmn.create_communicator()
    if comm.size > 1:
        raise UsageError(
            f"This script trains with one worker but was started as {comm.size}. Start "
            "train_cifar_multi_node.py."
        )
    device = torch.device("cuda" if options.gpus else "cpu")
    print(f"Start a training script using single {'GPU' if options.gpus else 'CPU'}.")
    print(f"# Minibatch-size: {options.batchsize}")
    print(f"# epoch: {options.epoch}")
    images = load(options)
    raise_if_one_image(options, len(images.train), 1)
    model = build(options, images).to(device)
    optimizer = build_optimizer(options, model)

    # The order of images depends on the seed only: it is the same for any number of workers.
    sampler = torchmn.GlobalSampler(images.train, comm, options.batchsize, options.seed)
    updater = torchmn.StandardUpdater(
        DataLoader(images.train, batch_sampler=sampler), optimizer, model, device=device
    )
    trainer = torchmn.Trainer(updater, (options.epoch, "epoch"), options.out)
    evaluator = Evaluator(
        DataLoader(images.test, options.batchsize),
        model,
        eval_func=lambda *batch: model(*batch_to(batch, device)),
    )
    # Weighs the last, smaller batch by its size. ChainerMN did not.
    trainer.extend(torchmn.create_multi_node_evaluator(evaluator, comm))
    num_images = len(images.train)
    extend_with_reports(
        trainer, comm, images_per_epoch=num_images, has_snapshot=not options.no_snapshot
    )

    trainer.run()
    print_throughput(options.epoch * num_images, trainer.elapsed_time)


if __name__ == "__main__":
    torchmn.run_main(main)
