"""Partial outer steps: for a block that is not full, or before its mean is known.

An outer step moves an anchor a by the mean pseudo-gradient d of a block of B samples and updates
its own state s: (a, s) <- full(a, s, d). In N < B samples, u = N / B, the ranks have moved about
u times as far as in a full block, so the outer step is taken u of the way:

    (a', s') = full(a, s, d / u)
    a <- a + u (a' - a)
    s <- s + u (s' - s)

With u -> 0 nothing moves but by d itself, which has that size too; u = 1 is the full block. A run
at constant speed, d = u D, moves by u times what a full block of D moves. Where ``full`` is
linear in s and d, as for block momentum and SGD with momentum, every pseudo-gradient counts once
in the long run, however the blocks are divided: see ``docs/explain/block-momentum.md``.

The state is the same on all ranks, so each of them knows before the exchange of d what the step is
for d = 0: for Nesterov momentum m and rate r that is - r m² s. With overlap a rank moves its
parameters by it when the exchange starts, and by the rest when it has ended. Otherwise the momentum
of every block is late by the steps of the exchange, and the more of it there is, the more the
overlap costs. (Source: our own; Kale et al., *Eager Updates For Overlapped Communication and
Computation in DiLoCo*, 2025, also take the rank's own part of d at once.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchmn.exchange.schedules.local_updates.fragments import PseudoGradient

OuterState = Mapping[tuple[str, str], Tensor]
"""The tensors that an outer step changes besides the anchors, by parameter and kind."""


@torch.no_grad()
def take_partial_step(
    pseudo_gradients: Sequence[PseudoGradient],
    part: float,
    step: Callable[[Sequence[PseudoGradient]], None],
    state: Callable[[Sequence[PseudoGradient]], OuterState],
) -> list[Tensor]:
    """Move anchors and outer state by a part of a full block's outer step, in place. Local.

    Returns the change of each anchor that the full step would make.

    Args:
        pseudo_gradients: those of the partial block; with ``part`` 0 their means are not read.
        part: u, from 0 to 1; 0 changes nothing.
        step: makes the outer step of a full block.
        state: returns the tensors that ``step`` changes; one that does not exist yet counts as
            zeros.
    """
    before = {key: tensor.clone() for key, tensor in state(pseudo_gradients).items()}
    anchors = [each.anchor.clone() for each in pseudo_gradients]
    step(
        [
            replace(each, mean=each.mean / part if part else torch.zeros_like(each.anchor))
            for each in pseudo_gradients
        ]
    )
    changes = [each.anchor - anchor for each, anchor in zip(pseudo_gradients, anchors, strict=True)]
    for each, anchor in zip(pseudo_gradients, anchors, strict=True):
        each.anchor.copy_(anchor.lerp_(each.anchor, part) if part else anchor)
    for key, tensor in state(pseudo_gradients).items():
        if key not in before:
            tensor.mul_(part)
        else:
            tensor.copy_(before[key].lerp_(tensor, part) if part else before[key])
    return changes
