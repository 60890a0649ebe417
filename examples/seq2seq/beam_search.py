"""Beam search over a batch of segments."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models.seq2seq import BEGIN, END, PAD, Translator


@torch.no_grad()
def beam_search(
    model: Translator, source: Tensor, *, width: int = 5, max_length: int = 80, power: float = 1.0
) -> list[list[int]]:
    """The best translation of each segment that was found, without its end.

    A hypothesis is worth its log-probability / length ** power, its end included; one of
    ``max_length`` tokens need not have an end. Those that have ended stay in the beam and compete
    with longer ones. Width 1 is the greedy search.
    """
    num, device = len(source), source.device
    state = tuple(part.repeat_interleave(width, 0) for part in model.begin(source))
    first = torch.arange(num, device=device)[:, None] * width  # of the hypotheses of a segment
    total = torch.full((num, width), -math.inf, device=device)
    total[:, 0] = 0.0  # the others would be copies of it
    total = total.flatten()
    length = torch.zeros_like(total)
    has_ended = torch.zeros_like(total, dtype=torch.bool)
    written = torch.full((num * width, max_length), END, device=device)
    tokens = torch.full((num * width, 1), BEGIN, device=device)
    for place in range(max_length):
        scores, state = model.advance(state, tokens)
        step = scores[:, -1].float().log_softmax(1)
        step[:, [PAD, BEGIN]] = -math.inf
        step[has_ended] = -math.inf
        step[has_ended, END] = 0.0
        sums, length = total[:, None] + step, length + ~has_ended
        worth = (sums / length[:, None] ** power).view(num, -1)
        best = worth.topk(width).indices
        parent = (first + best // step.shape[1]).flatten()
        token = (best % step.shape[1]).flatten()
        total, length = sums[parent, token], length[parent]
        has_ended = has_ended[parent] | (token == END)
        state = tuple(part[parent] for part in state)
        written = written[parent]
        written[:, place], tokens = token, token[:, None]
        if has_ended.all():
            break
    return [row[: row.index(END)] if END in row else row for row in written[::width].tolist()]
