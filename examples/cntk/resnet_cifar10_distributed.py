"""Train a residual network on CIFAR-10 as CNTK's ConvNet_CIFAR10_DataAug_Distributed.py does.

    python examples/cntk/make_data.py cifar10 --download --data-root archives --out data
    torchmn run -n 2 examples/cntk/resnet_cifar10_distributed.py -datadir data -q 1 -a 50000

The options are those of CNTK's script, and a second start continues from the last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

import torch
from options import parse_options
from torch import Tensor, nn

import torchmn
import torchmn.cntk as C
import torchmn.cntk.io.transforms as xforms
from torchmn.cntk.train.distributed import Communicator
from torchmn.errors import UsageError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import ResNet

NUM_CLASSES = 10


class Network(nn.Module):
    """A residual network, whose inputs are pixels of 0 to 255 minus the mean."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.layers = ResNet(NUM_CLASSES, num_blocks)

    def forward(self, features: Tensor) -> Tensor:
        """Logits."""
        return self.layers(features * (1.0 / 256))


def create_source(folder: str, part: str, max_samples: int) -> C.io.MinibatchSource:
    transforms = []
    if part == "train":
        crop = xforms.crop(crop_type="randomside", side_ratio=0.8, jitter_type="uniratio")
        transforms.append(crop)
    transforms += [
        xforms.scale(width=32, height=32, channels=3, interpolations="linear"),
        xforms.mean(os.path.join(folder, "CIFAR-10_mean.xml")),
    ]
    streams = C.io.StreamDefs(
        features=C.io.StreamDef(field="image", transforms=transforms),
        labels=C.io.StreamDef(field="label", shape=NUM_CLASSES),
    )
    deserializer = C.io.ImageDeserializer(os.path.join(folder, f"{part}_map.txt"), streams)
    return C.io.MinibatchSource(deserializer, randomize=part == "train", max_samples=max_samples)


def create_trainer(model: Network, options: argparse.Namespace, writers: list) -> C.Trainer:
    lr_per_sample = [0.0015625] * 20 + [0.00046875] * 20 + [0.00015625] * 20
    lr_per_sample += [0.000046875] * 10 + [0.000015625]
    lr = C.learning_rate_schedule(lr_per_sample, C.UnitType.sample, options.epoch_size)
    time_constants = [0] * 20 + [600] * 20 + [1200]
    momentum = C.momentum_as_time_constant_schedule(time_constants, options.epoch_size)
    learner = C.momentum_sgd(model.parameters(), lr, momentum, l2_regularization_weight=0.0001)
    if options.block_samples:
        if options.quantized_bits != 32:
            raise UsageError("Block momentum cannot be used with quantization: leave out -q.")
        learner = C.block_momentum_distributed_learner(
            learner, options.block_samples, distributed_after=options.distributed_after
        )
    else:
        learner = C.data_parallel_distributed_learner(
            learner, options.distributed_after, options.quantized_bits
        )
    criterion = C.cross_entropy_with_softmax, C.classification_error
    return C.Trainer(model, criterion, learner, writers)


def main() -> None:
    options = parse_options()
    device = C.mpi_communicator(options.communicator).ranks.device
    if options.device is not None:
        device = C.device.cpu() if options.device < 0 else C.device.gpu(options.device)
    torch.manual_seed(0)
    model = Network(options.blocks).to(device)
    log = options.logdir and os.path.join(options.logdir, "log")
    rank = Communicator.rank()
    printing = {"tag": "Training", "gen_heartbeat": True, "num_epochs": options.num_epochs}
    writers = [C.logging.ProgressPrinter(100, log_to_file=log, rank=rank, **printing)]
    if options.tensorboard_logdir:
        writers.append(C.logging.TensorBoardProgressWriter(100, options.tensorboard_logdir, rank))
    trainer = create_trainer(model, options, writers)
    C.logging.log_number_of_parameters(model)
    train = create_source(options.datadir, "train", options.num_epochs * options.epoch_size)
    test = create_source(options.datadir, "test", C.io.FULL_DATA_SWEEP)
    inputs = {"features": train.streams.features, "labels": train.streams.labels}
    with torchmn.record.trace() if options.profile else contextlib.nullcontext():
        C.train.training_session(
            trainer=trainer,
            mb_source=train,
            mb_size=options.minibatch_size,
            model_inputs_to_streams=inputs,
            progress_frequency=options.epoch_size,
            checkpoint_config=C.CheckpointConfig(
                frequency=options.epoch_size,
                filename=os.path.join(options.outputdir, "ResNet_CIFAR10_DataAug"),
                restore=not options.restart,
            ),
            test_config=C.TestConfig(test, minibatch_size=options.minibatch_size),
        ).train(device)
    Communicator.finalize()


if __name__ == "__main__":
    torchmn.run_main(main)
