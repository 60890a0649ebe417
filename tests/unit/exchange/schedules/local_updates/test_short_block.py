"""A block that ended early moves by a part of a full one, and nothing of it is lost or doubled."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.exchange.schedules.local_updates.runs import (
    adam,
    average,
    sgd,
    simulate,
    train,
    wrap,
)
from tests.unit.models import equal, near, values
from torchmn.exchange.schedules import BlockMomentum, DiLoCo, LocalUpdateSchedule, PeriodicAverage
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


@given(st.floats(1e-6, 1), st.floats(0, 0.95), st.booleans())
def test_at_one_speed_a_part_of_a_block_moves_that_part(
    part: float, momentum: float, nesterov: bool
) -> None:
    schedule = Smoothing(momentum, 1 - momentum, nesterov=nesterov)
    full = torch.ones(6, dtype=torch.float64)
    schedule.smoothed = full.clone()  # what it is after many blocks of this pseudo-gradient
    start = schedule.anchor.clone()
    schedule.move(part * full, part)
    moved = (start - schedule.anchor) / (part * (1 + schedule.look))
    torch.testing.assert_close(moved, full, rtol=0, atol=1e-9)
    torch.testing.assert_close(schedule.smoothed, full)


SCHEDULES = {
    "block_momentum": lambda size: BlockMomentum(size),
    "classical": lambda size: BlockMomentum(size, nesterov=False),
    "diloco": lambda size: DiLoCo(size),
    "diloco_adam": lambda size: DiLoCo(size, outer=lambda ps: torch.optim.Adam(ps, 0.02)),
    "periodic_average": lambda size: PeriodicAverage(size),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_shorter_the_block_the_less_it_moves(schedule: str) -> None:
    """After full blocks at speed: one of a single sample of 64 moves a little, or nothing."""

    def rank_main(comm):
        moves = []
        for num_last in (0, 1, 8, 32):
            model, optimizer = wrap(comm, SCHEDULES[schedule](64 * comm.size))
            for step in range(8):
                train(model, optimizer, comm.rank, step, 32)
            before = values(model)
            # not a step of training: only the count of samples and what the schedule makes of it
            optimizer.schedule._take_anchors()
            optimizer.schedule._count_samples(num_last)
            optimizer.flush()
            gone = [a - b for a, b in zip(before, values(model), strict=True)]
            moves.append(math.sqrt(sum(float(way.pow(2).sum()) for way in gone)))
            optimizer.close()
        return moves

    for moves in run_ranks(rank_main, 2):
        nothing, sixty_fourth, eighth, half = moves
        assert nothing == 0
        if schedule == "periodic_average":
            assert half == 0
        else:
            assert sixty_fourth == pytest.approx(eighth / 8, rel=0.2)
            assert eighth == pytest.approx(half / 4, rel=0.2)
            assert half > 0


class Reference:
    """Block momentum in one process, full blocks as in CNTK, partial ones by the formula."""

    def __init__(self, size: int, block_size: float, *, nesterov: bool) -> None:
        self.size, self.block_size, self.nesterov = size, block_size, nesterov
        self.smoothed: list[Tensor] | None = None

    def __call__(self, anchors: list[Tensor], means: list[Tensor], n: float) -> list[Tensor]:
        constant = -self.block_size / math.log(1 - 1 / self.size)
        part = min(1.0, n / self.block_size)
        bm = math.exp(-max(n, self.block_size) / constant)
        self.smoothed = self.smoothed or [torch.zeros_like(a) for a in anchors]
        after = []
        for i, (anchor, mean) in enumerate(zip(anchors, means, strict=True)):
            push = (1 - bm) * self.size * mean
            move = part * bm * self.smoothed[i] + push
            self.smoothed[i] = (1 - part * (1 - bm)) * self.smoothed[i] + push
            after.append(anchor - (1 + bm if self.nesterov else 1) * move)
        return after


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("at", range(1, 4))
def test_flush_at_every_position_of_a_block(at: int, nesterov: bool) -> None:
    size, block_size = 2, 32

    def rank_main(comm):
        model, optimizer = wrap(comm, BlockMomentum(block_size, nesterov=nesterov), sgd)
        for step in range(12 + at):
            train(model, optimizer, comm.rank, step)
        optimizer.flush()
        after_flush = values(model)
        for step in range(12 + at, 16 + at):
            train(model, optimizer, comm.rank, step)
        return after_flush, values(model)

    blocks = [[[4] * 4] * size] * 3 + [[[4] * at] * size, [[4] * 4] * size]
    expected = simulate(size, blocks, Reference(size, block_size, nesterov=nesterov))
    for after_flush, at_end in run_ranks(rank_main, size):
        assert near(after_flush, expected[-2])
        assert near(at_end, expected[-1])


def test_the_first_blocks_of_fragments_are_parts() -> None:
    """Of four fragments the first ends after a quarter of a block: with a quarter of its weight."""
    seen: dict[int, list[float]] = {}

    class Watching(DiLoCo):
        def partial_outer_step(self, pseudo_gradients, part):
            seen.setdefault(self._comm.rank, []).append(part)
            super().partial_outer_step(pseudo_gradients, part)

    def rank_main(comm):
        model, optimizer = wrap(comm, Watching(32, num_fragments=4), adam)
        for step in range(8):
            train(model, optimizer, comm.rank, step)
        return values(model)

    run_ranks(rank_main, 2)
    assert seen == {rank: [0.25, 0.5, 0.75] for rank in range(2)}


@pytest.mark.parametrize("at", range(1, 4))
def test_an_average_is_exact_wherever_the_block_ends(at: int) -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, PeriodicAverage(32), adam)
        for step in range(at):
            train(model, optimizer, comm.rank, step)
        optimizer.flush()
        return values(model)

    expected = simulate(2, [[[4] * at] * 2], average, adam)[-1]
    results = run_ranks(rank_main, 2)
    assert equal(*results)
    assert near(results[0], expected, 1e-15)


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
        train(model, optimizer, comm.rank, 0)
        optimizer.flush()
        return values(model)

    def half(anchors, means, num_samples):
        return [a - 0.5 * d for a, d in zip(anchors, means, strict=True)]

    expected = simulate(2, [[[4]] * 2], half)[-1]
    for result in run_ranks(rank_main, 2):
        assert near(result, expected)
