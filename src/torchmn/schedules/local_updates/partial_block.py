"""What a block moves that ended before it was full.

A recipe moves an anchor a by the mean movement d of a block of B samples, and remembers something
of it, s: (a, s) <- full(a, s, d). Of N < B samples, u = N / B, the ranks have gone about u as far
as in a full block, and the recipe is to be moved u of the way:

    (a', s') = full(a, s, d / u)
    a <- a + u (a' - a)
    s <- s + u (s' - s)

With u -> 0 nothing moves but for d itself, which is of that size too; u = 1 is the full block. A
run that goes on at one speed, d = u D, moves by u of what a full block of D moves. Where ``full``
is linear in s and d, as that of block momentum and of SGD with momentum is, every movement counts
once in the long run, however the blocks are cut: see ``docs/explain/block-momentum.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from torchmn.schedules.local_updates.fragments import Movement

Remembered = Mapping[tuple[str, str], Tensor]


def move_part_(
    movements: Sequence[Movement],
    part: float,
    move_: Callable[[Sequence[Movement]], None],
    remembered: Callable[[Sequence[Movement]], Remembered],
) -> None:
    """Move anchors, and what a recipe remembers of them, by a part of a block, in place. Local.

    ``part``: u, between 0 and 1. ``move_``: moves them by a full block. ``remembered``: the
    tensors that ``move_`` changes beside anchors; one that is not there yet counts as zeros.
    """
    before = {key: tensor.clone() for key, tensor in remembered(movements).items()}
    anchors = [movement.anchor.clone() for movement in movements]
    move_([replace(movement, mean=movement.mean / part) for movement in movements])
    for movement, anchor in zip(movements, anchors, strict=True):
        movement.anchor.copy_(anchor.lerp_(movement.anchor, part))
    for key, tensor in remembered(movements).items():
        tensor.copy_(before[key].lerp_(tensor, part) if key in before else tensor * part)
