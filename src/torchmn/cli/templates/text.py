"""Train a language model on one worker or many: torchmn run -n 2 train.py

Written by `torchmn init`. `load_data` and `build_model` are what you will change first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import torchmn
from torchmn.errors import DataError

DATA_HELP = "text file (default: the source of a Python module)"
RATE = 1e-3

LENGTH = 64  # bytes that the model sees at once


def load_data(path: str | None) -> list[Subset]:
    """Training and test pieces, each (bytes, bytes that follow); any data sets will do."""
    file = Path(path or argparse.__file__)
    if not file.is_file() or file.stat().st_size <= LENGTH:
        raise DataError(f"{path} must be a file of text, of more than {LENGTH} bytes")
    text = bytearray(file.read_bytes())
    numbers, end = torch.frombuffer(text, dtype=torch.uint8).long(), len(text) - 1
    end -= end % LENGTH
    pieces, followers = numbers[:end].view(-1, LENGTH), numbers[1 : end + 1].view(-1, LENGTH)
    data = TensorDataset(pieces, followers)
    return random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))


class LanguageModel(nn.Module):
    """A model from bytes (batch, length) to scores of the next ones (batch, length, 256)."""

    def __init__(self, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.scores = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=text.device)
        hidden = self.bytes(text) + self.positions
        return self.scores(self.layers(hidden, mask=mask, is_causal=True))


def build_model(train: Subset) -> nn.Module:
    """The model for pieces like these."""
    return LanguageModel()


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean loss over a batch."""
    return cross_entropy(scores.flatten(0, 1), targets.flatten())
