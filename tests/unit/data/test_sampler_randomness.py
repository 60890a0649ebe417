"""A sampler that draws again from the same random numbers."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from torchmn.data.sampler_randomness import GeneratorMarks, capture, replayed


def test_every_generator_is_replayed_and_the_process_s_own_continue() -> None:
    own = torch.Generator().manual_seed(1)
    sampler = BatchSampler(RandomSampler(range(9), generator=own), 3, drop_last=False)

    def draw() -> tuple[object, ...]:
        drawn = torch.rand(2).tolist(), random.random(), np.random.rand(), random.gauss(0, 1)
        return (*drawn, np.random.randn(), list(sampler))

    state = capture(sampler)
    wanted = draw()
    left = own.get_state()
    before = capture(None)
    with replayed(state, sampler):
        assert draw() == wanted
    assert torch.equal(own.get_state(), left), "it stays where the draws have left it"
    first = torch.rand(2).tolist(), random.random(), np.random.rand()
    with replayed(before, None):
        assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == first


def test_an_endless_pass_keeps_few_marks() -> None:
    own = torch.Generator()
    marks = GeneratorMarks(RandomSampler(range(3), generator=own))

    def draws():
        while True:
            yield torch.rand(1, generator=own)

    batches = marks.marked(draws())
    for number in range(1, 101):
        next(batches)
        marks.forget_before(number - 1)
        if number == 99:
            wanted = own.get_state()
    marks.drawn()
    assert len(marks._states) == 2
    marks.rewind(99)
    assert torch.equal(own.get_state(), wanted)
