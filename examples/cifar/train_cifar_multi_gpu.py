"""Train VGG on CIFAR-10 with several devices of one machine, from one plain script.

    python examples/cifar/train_cifar_multi_gpu.py --gpus 2

No launcher is needed: the updater starts a rank for each further device. The optimizer steps on the
main device, which broadcasts the parameters. Without GPUs it uses CPU devices (two by default).
"""

from __future__ import annotations

import torch
from options import build, build_optimizer, load, parse_options, print_throughput
from pytorch_pfn_extras.training.extensions import Evaluator
from torch.utils.data import DataLoader

import torchmn
from torchmn.train import extend_with_reports
from torchmn.train.evaluation import batch_to


def main() -> None:
    options = parse_options("Train a network on small images with several devices.")
    has_gpus = torch.cuda.is_available()
    num_devices = options.gpus or 2
    devices: dict[str, int | str] = {"main": 0 if has_gpus else "cpu"}
    for index in range(1, num_devices):
        devices[f"gpu{index}"] = index if has_gpus else "cpu"
    print(f"Start a training script using multiple {'GPUs' if has_gpus else 'CPU devices'}.")
    print(f"# {'GPUs' if has_gpus else 'CPU devices'}: {num_devices}")
    print(f"# Minibatch-size: {options.batchsize}")
    print(f"# epoch: {options.epoch}")
    print(devices)
    images = load(options)
    model = build(options, images)

    parts = torchmn.split_dataset_n_random(images.train, num_devices, seed=options.seed)
    iterators = [
        torchmn.SerialIterator(part, options.batchsize, seed=options.seed + index)
        for index, part in enumerate(parts)
    ]
    updater = torchmn.MultiprocessParallelUpdater(
        iterators, build_optimizer(options, model), model, devices=devices
    )
    trainer = torchmn.Trainer(updater, (options.epoch, "epoch"), options.out)
    evaluator = Evaluator(
        DataLoader(images.test, options.batchsize),
        model,
        eval_func=lambda *batch: model(*batch_to(batch, updater.devices["main"])),
    )
    comm = torchmn.create_communicator()  # of this process alone: the workers do not evaluate
    trainer.extend(torchmn.create_multi_node_evaluator(evaluator, comm))
    num_images = len(images.train)
    extend_with_reports(
        trainer, comm, images_per_epoch=num_images, has_snapshot=not options.no_snapshot
    )

    trainer.run()
    print_throughput(options.epoch * num_images, trainer.elapsed_time)


if __name__ == "__main__":
    torchmn.run_main(main)
