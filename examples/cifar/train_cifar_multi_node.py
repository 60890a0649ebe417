"""Train VGG on CIFAR-10 with many workers: `train_cifar.py` with changed lines, (1) to (5).

    torchmn run -n 2 examples/cifar/train_cifar_multi_node.py --epoch 4 --batchsize 32

It runs unchanged under mpirun, torchrun and `torchmn run`.
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
from torchmn.data import EmptyBatchCollate
from torchmn.train import extend_with_reports
from torchmn.train.evaluation import batch_to


def main() -> None:
    options = parse_options(
        "Train a network on small images with many workers.", communicator="auto"
    )
    comm = torchmn.create_communicator(options.communicator)  # (1)
    device = comm.device if options.gpus else torch.device("cpu")
    if comm.rank == 0:
        print("Start a training script using multiple nodes.")
        print("==========================================")
        print(f"Num process (COMM_WORLD): {comm.size}")
        print(f"Using {'GPUs' if device.type == 'cuda' else 'CPUs'}")
        print(f"Using {comm.name} communicator")
        print(f"Num Minibatch-size: {options.batchsize}")
        print(f"Num epoch: {options.epoch}")
        print("==========================================", flush=True)
    images = load(options, comm)
    raise_if_one_image(options, len(images.train), comm.size)
    model = build(options, images).to(device)  # (2)
    torchmn.seed_ranks(options.seed, comm)  # dropout differs between workers

    # (3) One order for all, of which each worker takes its part of each global batch.
    sampler = torchmn.GlobalSampler(
        len(images.train), comm, options.batchsize * comm.size, options.seed
    )
    loader = DataLoader(
        images.train, batch_sampler=sampler, collate_fn=EmptyBatchCollate(images.train)
    )
    test = torchmn.scatter_dataset(images.test, comm, force_equal_length=False)

    optimizer = torchmn.create_multi_node_optimizer(  # (4)
        build_optimizer(options, model), comm, model, weight="samples"
    )
    updater = torchmn.StandardUpdater(loader, optimizer, model, device=device)
    trainer = torchmn.Trainer(updater, (options.epoch, "epoch"), options.out, comm=comm)
    evaluator = Evaluator(
        DataLoader(test, options.batchsize),
        model,
        eval_func=lambda *batch: model(*batch_to(batch, device)),
    )
    trainer.extend(torchmn.create_multi_node_evaluator(evaluator, comm))  # (5)
    num_images = len(images.train)
    extend_with_reports(
        trainer, comm, images_per_epoch=num_images, has_snapshot=not options.no_snapshot
    )
    if options.checkpoint:
        checkpointer = torchmn.create_multi_node_checkpointer(comm, options.checkpoint, "cifar")
        trainer.extend(checkpointer, trigger=(1, "epoch"))
        checkpointer.maybe_load(trainer)

    trainer.run()
    if comm.rank == 0:
        print_throughput(options.epoch * num_images, trainer.elapsed_time)


if __name__ == "__main__":
    torchmn.run_main(main)
