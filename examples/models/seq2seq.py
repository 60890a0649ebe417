"""Two networks that translate: an LSTM with attention and a transformer.

Both read a segment with ``begin`` and write with ``advance``, token by token in a search or the
whole target at once in training. What is known in between is a tuple of tensors whose first
dimension is the batch, so that a search selects hypotheses by indexing. Padding never changes a
result. Source and target have one vocabulary, whose embedding is also the output layer (Press and
Wolf 2017, https://arxiv.org/abs/1608.05859).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

PAD, BEGIN, END = 0, 1, 2
State = tuple[Tensor, ...]


class Translator(nn.Module, ABC):
    """Maps tokens of a segment to scores of the tokens of its translation."""

    def __init__(self, num_tokens: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width, padding_idx=PAD)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        nn.init.zeros_(self.tokens.weight[PAD].detach())
        self.dropout = nn.Dropout(dropout)

    @abstractmethod
    def begin(self, source: Tensor) -> State:
        """Read segments ``(batch, length)``, padded at their ends."""

    @abstractmethod
    def advance(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """The scores ``(batch, length, tokens)`` of what follows each of these tokens."""

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The scores of what follows each token of the target."""
        return self.advance(self.begin(source), target)[0]

    def scores(self, hidden: Tensor) -> Tensor:
        """The output layer."""
        return nn.functional.linear(self.dropout(hidden), self.tokens.weight)


class AttentionLSTM(Translator):
    """An encoder in both directions and a decoder with global attention.

    The "general" score of Luong et al. 2015 (https://arxiv.org/abs/1508.04025), without input
    feeding, so that one call of the LSTM runs over the whole target. ChainerMN's example had no
    attention.
    """

    def __init__(
        self, num_tokens: int, width: int = 256, num_layers: int = 1, dropout: float = 0.3
    ) -> None:
        super().__init__(num_tokens, width, dropout)
        between = dropout if num_layers > 1 else 0.0
        self.encoder = nn.LSTM(
            width, width // 2, num_layers, batch_first=True, bidirectional=True, dropout=between
        )
        self.decoder = nn.LSTM(width, width, num_layers, batch_first=True, dropout=between)
        self.query = nn.Linear(width, width, bias=False)
        self.combine = nn.Linear(2 * width, width)

    def begin(self, source: Tensor) -> State:
        """Keep the encoder's outputs, and its last states for the decoder."""
        lengths = (source != PAD).sum(1).cpu()
        packed = pack_padded_sequence(
            self.dropout(self.tokens(source)), lengths, batch_first=True, enforce_sorted=False
        )
        outputs, states = self.encoder(packed)
        memory, _ = pad_packed_sequence(outputs, batch_first=True, total_length=source.shape[1])
        # (layers x directions, batch, width / 2) to (batch, layers, width)
        h, c = (s.unflatten(0, (-1, 2)).permute(2, 0, 1, 3).flatten(2) for s in states)
        return memory, source == PAD, h, c

    def advance(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Run the decoder over these tokens, then attend with all of its outputs at once."""
        memory, is_padding, *states = state
        h, c = (s.transpose(0, 1).contiguous() for s in states)
        hidden, (h, c) = self.decoder(self.dropout(self.tokens(tokens)), (h, c))
        similarity = self.query(hidden) @ memory.transpose(1, 2)
        attention = similarity.masked_fill(is_padding[:, None], -math.inf).softmax(2)
        hidden = torch.tanh(self.combine(torch.cat([attention @ memory, hidden], 2)))
        return self.scores(hidden), (memory, is_padding, h.transpose(0, 1), c.transpose(0, 1))


class TranslationTransformer(Translator):
    """Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762) with normalization before layers."""

    def __init__(
        self,
        num_tokens: int,
        width: int = 256,
        num_layers: int = 3,
        dropout: float = 0.2,
        num_heads: int = 4,
    ) -> None:
        super().__init__(num_tokens, width, dropout)
        options = (width, num_heads, 4 * width, dropout)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(*options, batch_first=True, norm_first=True),
            num_layers,
            nn.LayerNorm(width),
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(*options, batch_first=True, norm_first=True),
            num_layers,
            nn.LayerNorm(width),
        )

    def begin(self, source: Tensor) -> State:
        """Keep the encoder's outputs, and the tokens that have been written: none."""
        is_padding = source == PAD
        memory = self.encoder(self.embedded(source), src_key_padding_mask=is_padding)
        return memory, is_padding, source[:, :0]

    def advance(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Run the decoder over all tokens so far. Nothing of earlier calls is cached."""
        memory, is_padding, before = state
        target = torch.cat([before, tokens], 1)
        length = target.shape[1]
        is_later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        hidden = self.decoder(
            self.embedded(target), memory, is_later, memory_key_padding_mask=is_padding
        )
        return self.scores(hidden[:, -tokens.shape[1] :]), (memory, is_padding, target)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings with the sines and cosines of their places."""
        width, device = self.tokens.embedding_dim, tokens.device
        rates = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000) / width))
        angles = torch.arange(tokens.shape[1], device=device)[:, None] * rates
        places = torch.cat([angles.sin(), angles.cos()], 1)
        return self.dropout(math.sqrt(width) * self.tokens(tokens) + places)
