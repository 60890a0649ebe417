"""The options of CNTK's ConvNet_CIFAR10_DataAug_Distributed.py."""

from __future__ import annotations

import argparse


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a residual network on CIFAR-10.")
    add = parser.add_argument
    add("-datadir", default="data", help="folder of the map files and the mean")
    add("-outputdir", default="models", help="folder of the checkpoints")
    add("-logdir", help="folder of a log file for each rank")
    add("-tensorboard_logdir", help="folder of events for TensorBoard")
    add("-n", "--num_epochs", type=int, default=160, help="epochs in all")
    add("-m", "--minibatch_size", type=int, default=64, help="images of all ranks in a minibatch")
    add("-e", "--epoch_size", type=int, default=50000, help="images in an epoch")
    add("-q", "--quantized_bits", type=int, default=32, help="bits of a gradient: 32 to 1")
    add("-a", "--distributed_after", type=int, default=0, help="images with 32 bits, no blocks")
    add("-b", "--block_samples", type=int, help="images in a block: trains by block momentum")
    add("-r", "--restart", action="store_true", help="do not continue from a checkpoint")
    add("-device", type=int, help="number of a GPU, -1 for the CPU; default: by the local rank")
    add("-profile", action="store_true", help="write a trace for chrome://tracing")
    add("-communicator", default="auto", help="route of the sum of gradients")
    add("-blocks", type=int, default=3, help="size of the network: 3 is ResNet-20")
    return parser.parse_args()
