"""Options, text and schedules of the language model."""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import torchmn
from torchmn.errors import DataError, UsageError

SCHEDULES = ("every_step", "block_momentum", "diloco", "streaming")
CODECS = ("float32", "bfloat16", "int8", "int4", "1bit")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a language model over slow links.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, help="a text, maybe .gz; by default the text of this program")
    add("--schedule", default="diloco", choices=SCHEDULES, help="what is exchanged, and when")
    add("--codec", default="float32", choices=CODECS, help="the form in which it is sent")
    add("--block", type=int, default=50, help="steps between two exchanges of parameters")
    add("--communicator", default="auto", help="route of the mean; auto encodes between hosts only")
    add("--batchsize", type=int, default=32, help="sequences of a step, over all ranks")
    add("--length", type=int, default=128, help="bytes of a sequence")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--learnrate", type=float, default=1e-3, help="learning rate of AdamW, after the warm-up")
    add("--steps", type=int, default=1000)
    add("--eval", type=int, default=100, help="steps between two validations")
    add("--out", default="result", help="folder of the checkpoints")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in ("block", "batchsize", "length", "layers", "width", "heads", "steps", "eval"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} is {getattr(options, name)}. It must be at least 1.")
    if options.width % options.heads:
        raise UsageError(f"--width {options.width} must be a multiple of --heads {options.heads}.")
    return options


def exchange_of(options: argparse.Namespace) -> dict[str, Any]:
    """Codec and schedule, as `create_multi_node_optimizer` takes them."""
    block = options.block * options.batchsize  # samples over all ranks
    schedule: Any = {
        "block_momentum": lambda: torchmn.schedules.BlockMomentum(block),
        "diloco": lambda: torchmn.schedules.DiLoCo(block),
        "streaming": lambda: torchmn.schedules.DiLoCo(block, num_fragments=2, overlap_steps=4),
    }.get(options.schedule, lambda: options.schedule)()
    return {"schedule": schedule, "codec": None if options.codec == "float32" else options.codec}


class Excerpts(Dataset[Tensor]):
    """Excerpts of ``length + 1`` tokens, one from every ``stride`` tokens on."""

    def __init__(self, text: Tensor, length: int, stride: int) -> None:
        self._text, self._length, self._stride = text, length, stride

    def __len__(self) -> int:
        return max(0, (len(self._text) - self._length - 1) // self._stride + 1)

    def __getitem__(self, index: int) -> Tensor:
        begin = index * self._stride
        return self._text[begin : begin + self._length + 1].long()


def load_text(options: argparse.Namespace) -> tuple[Excerpts, Excerpts]:
    """The bytes of the text as `divide` divides them."""
    return divide(torch.frombuffer(bytearray(read_text(options.data)), dtype=torch.uint8), options)


def read_text(path: Path | None) -> bytes:
    """The bytes of a file, maybe .gz; by default those of this program."""
    path = path or Path(__file__)
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}. Give a text with --data.") from error


def divide(text: Tensor, options: argparse.Namespace) -> tuple[Excerpts, Excerpts]:
    """Training excerpts of the first nine tenths, and validation excerpts of the rest.

    Training excerpts begin at every token; those of validation do not overlap.
    """
    border = len(text) * 9 // 10
    train = Excerpts(text[:border], options.length, 1)
    test = Excerpts(text[border:], options.length, options.length)
    if len(train) < options.batchsize or not len(test):
        raise DataError(
            f"The text has {len(text)} tokens, too few for {options.batchsize} sequences of "
            f"{options.length} and a validation. Give a longer text, or smaller numbers."
        )
    return train, test
