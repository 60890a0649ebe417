"""What an outer step will do whatever the ranks have learned in the block.

An outer step moves an anchor a by the mean pseudo-gradient d of a block and updates its state s.
The state is the same on all ranks, so each of them knows before the exchange of d what the step is
for d = 0: for Nesterov momentum m and rate r that is - r m² s. With overlap a rank moves its
parameters by it when the exchange starts, and by the rest when it has ended. Otherwise the momentum
of every block is late by the steps of the exchange, and the more of it there is, the more the
overlap costs.

Source: our own; Kale et al., *Eager Updates For Overlapped Communication and Computation in
DiLoCo*, 2025, also take the rank's own part of d at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchmn.exchange.schedules.local_updates.fragments import PseudoGradient


@torch.no_grad()
def momentum_of(
    pseudo_gradients: Sequence[PseudoGradient],
    step: Callable[[Sequence[PseudoGradient]], None],
    state: Callable[[Sequence[PseudoGradient]], OuterState],
) -> list[Tensor] | None:
    """The change of each anchor in an outer step with zeros; None before the first one. Local.

    Anchors and outer state are as before when it returns; ``mean`` of the arguments is not read.

    Args:
        pseudo_gradients: of the block.
        step: the outer step of a full block.
        state: the tensors that ``step`` changes; one that does not exist yet counts as zeros.
    """
    before = {key: tensor.clone() for key, tensor in state(pseudo_gradients).items()}
    if not before:
        return None
    anchors = [each.anchor.clone() for each in pseudo_gradients]
    step([replace(each, mean=torch.zeros_like(each.anchor)) for each in pseudo_gradients])
    changes = []
    for each, anchor in zip(pseudo_gradients, anchors, strict=True):
        changes.append(each.anchor - anchor)
        each.anchor.copy_(anchor)
    for key, tensor in state(pseudo_gradients).items():
        if key in before:
            tensor.copy_(before[key])
        else:  # of parameters that were added since
            tensor.zero_()
    return changes


# The outer step of a block that ended before it was full.
#
# An outer step moves an anchor a by the mean pseudo-gradient d of a block of B samples and updates
# its own state s: (a, s) <- full(a, s, d). In N < B samples, u = N / B, the ranks have moved about
# u times as far as in a full block, so the outer step is taken u of the way:
#
#     (a', s') = full(a, s, d / u)
#     a <- a + u (a' - a)
#     s <- s + u (s' - s)
#
# With u -> 0 nothing moves but by d itself, which has that size too; u = 1 is the full block. A run
# at constant speed, d = u D, moves by u times what a full block of D moves. Where ``full`` is
# linear in s and d, as for block momentum and SGD with momentum, every pseudo-gradient counts once
# in the long run, however the blocks are divided: see ``docs/explain/block-momentum.md``.

OuterState = Mapping[tuple[str, str], Tensor]
"""The tensors that an outer step changes besides the anchors, by parameter and kind."""


def take_partial_step(
    pseudo_gradients: Sequence[PseudoGradient],
    part: float,
    step: Callable[[Sequence[PseudoGradient]], None],
    state: Callable[[Sequence[PseudoGradient]], OuterState],
) -> None:
    """Move anchors and outer state by a part of a full block's outer step, in place. Local.

    Args:
        pseudo_gradients: of the partial block.
        part: u, between 0 and 1.
        step: the outer step of a full block.
        state: the tensors that ``step`` changes; one that does not exist yet counts as zeros.
    """
    before = {key: tensor.clone() for key, tensor in state(pseudo_gradients).items()}
    anchors = [each.anchor.clone() for each in pseudo_gradients]
    step([replace(each, mean=each.mean / part) for each in pseudo_gradients])
    for each, anchor in zip(pseudo_gradients, anchors, strict=True):
        each.anchor.copy_(anchor.lerp_(each.anchor, part))
    for key, tensor in state(pseudo_gradients).items():
        tensor.copy_(before[key].lerp_(tensor, part) if key in before else tensor * part)
