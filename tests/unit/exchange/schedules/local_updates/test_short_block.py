"""A block that ended early moves by a part of a full one, and nothing of it is lost or doubled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.exchange.schedules.local_updates.runs import adam, sgd, simulate, wrap
from tests.unit.models import near, train, values
from torchmn.exchange.schedules import DiLoCo, LocalUpdateSchedule
from torchmn.exchange.schedules.local_updates.fragments import PseudoGradient
from torchmn.exchange.schedules.local_updates.outer_momentum import take_partial_step
from torchmn.testing import run_ranks


class Smoothing:
    """s <- b s + g d, a <- a - (1 + look) s: block momentum and SGD with momentum."""

    def __init__(self, momentum: float, gain: float, *, nesterov: bool) -> None:
        self.momentum, self.gain = momentum, gain
        self.look = momentum if nesterov else 0.0
        self.anchor = torch.linspace(-1, 1, 6, dtype=torch.float64)
        self.smoothed: Tensor | None = None

    def move(self, mean: Tensor, part: float) -> None:
        take_partial_step(
            [PseudoGradient(name="w", anchor=self.anchor, mean=mean)],
            part,
            self._step,
            lambda _: {} if self.smoothed is None else {("w", "smoothed"): self.smoothed},
        )

    def _step(self, pseudo_gradients) -> None:
        (each,) = pseudo_gradients
        if self.smoothed is None:
            self.smoothed = torch.zeros_like(each.mean)
        self.smoothed.mul_(self.momentum).add_(each.mean, alpha=self.gain)
        each.anchor.sub_(self.smoothed, alpha=1 + self.look)

    def end(self) -> Tensor:
        """The limit of the anchor after infinitely many blocks without progress."""
        rest = self.momentum / (1 - self.momentum) * (1 + self.look)
        return self.anchor - (0 if self.smoothed is None else rest * self.smoothed)


@given(
    st.lists(st.floats(1e-4, 1), min_size=1, max_size=12),
    st.floats(0, 0.95),
    st.booleans(),
)
@settings(deadline=None)
def test_every_pseudo_gradient_counts_once_however_blocks_are_divided(
    parts: list[float], momentum: float, nesterov: bool
) -> None:
    schedule = Smoothing(momentum, 1 - momentum, nesterov=nesterov)
    start, total = schedule.anchor.clone(), torch.zeros(6, dtype=torch.float64)
    for step, part in enumerate(parts):
        mean = torch.sin(torch.arange(6, dtype=torch.float64) + step)
        schedule.move(mean, part)
        total += mean
    factor = 1 + schedule.look
    torch.testing.assert_close(schedule.end(), start - factor * total, rtol=0, atol=1e-9)


def test_the_first_blocks_of_fragments_are_parts() -> None:
    """Of four fragments the first ends after a quarter of a block: with a quarter of its weight."""
    seen: dict[int, list[float]] = {}

    class Watching(DiLoCo):
        def partial_outer_step(self, pseudo_gradients, part):
            seen.setdefault(self._comm.rank, []).append(part)
            super().partial_outer_step(pseudo_gradients, part)

    def rank_main(comm):
        model, optimizer = wrap(comm, Watching(32, num_fragments=4), adam)
        train(model, optimizer, comm.rank, range(8))
        return values(model)

    run_ranks(rank_main, 2)
    assert seen == {rank: [0.25, 0.5, 0.75] for rank in range(2)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex128])
def test_parts_of_other_dtypes(dtype: torch.dtype) -> None:
    anchor = torch.linspace(-1, 1, 6).to(dtype)
    start, mean = anchor.clone(), torch.full((6,), 0.25).to(dtype)

    def move_(pseudo_gradients) -> None:
        for each in pseudo_gradients:
            each.anchor.sub_(each.mean, alpha=0.5)

    take_partial_step(
        [PseudoGradient(name="w", anchor=anchor, mean=mean)], 0.25, move_, lambda _: {}
    )
    torch.testing.assert_close(anchor, start - 0.5 * mean)


def test_a_schedule_of_ones_own_needs_to_know_nothing_of_parts() -> None:
    class Half(LocalUpdateSchedule):
        name = "half"

        def outer_step(self, pseudo_gradients, num_samples):
            for each in pseudo_gradients:
                each.anchor.sub_(each.mean, alpha=0.5)

    def rank_main(comm):
        model, optimizer = wrap(comm, Half(32), sgd)
        train(model, optimizer, comm.rank, [0])
        optimizer.flush()
        return values(model)

    def half(anchors, means, num_samples):
        return [a - 0.5 * d for a, d in zip(anchors, means, strict=True)]

    expected = simulate(2, [[[4]] * 2], half)[-1]
    for result in run_ranks(rank_main, 2):
        assert near(result, expected)
