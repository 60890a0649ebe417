"""A small transformer that predicts the next character of a text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, HEADS = 64, 4
NUM_CHARACTERS = 128


class Transformer(nn.Module):
    """Predicts each character from those before it: (batch, length) to (batch, length, 128)."""

    def __init__(self, num_layers: int, length: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(NUM_CHARACTERS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(length, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(num_layers)
        )
        self.output = nn.Linear(WIDTH, NUM_CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        """Scores of the next character at each place."""
        hidden = self.characters(characters) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(characters.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.output(hidden)
