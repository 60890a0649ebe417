"""A GPT-style language model.

Radford et al., *Language Models are Unsupervised Multitask Learners*, 2019: normalization before
each part, and the last projections of all parts initialized smaller by the square root of their
number.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Block(nn.Module):
    """Causal self-attention and two linear layers, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project1 = nn.Linear(width, width)
        self.hidden = nn.Linear(width, 4 * width)
        self.project2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project1(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.project2(gelu(self.hidden(self.norm2(x))))


class GPT(nn.Module):
    """Predicts each token from those before it: (batch, length) to (batch, length, tokens).

    Args:
        num_tokens: size of the vocabulary; 256 for bytes.
        length: the most tokens of a sequence.
        num_layers, width, num_heads: layers, features and attention heads of the model.
    """

    def __init__(
        self, num_tokens: int, length: int, num_layers: int, width: int, num_heads: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        self.places = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_last = ".project" in name
                nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** (0.5 * is_last))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token at each place; the embedding is the output layer, too."""
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.tokens.weight)
