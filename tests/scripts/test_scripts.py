"""Ordinary training scripts give on ranks what they give in one process, or are refused."""

from collections.abc import Iterator

import pytest
import torch

from . import compiled
from .registry import SCHEDULES, WORLD_SIZES, Refused, Script
from .running import check_exact, check_refused, differences, on_isolated_ranks, on_ranks
from .suite import all_scripts

pytestmark = [
    # What a user reads once, and torch's warnings about its own schedulers.
    pytest.mark.filterwarnings("ignore:More than one backward pass before step"),
    pytest.mark.filterwarnings("ignore:(.|\n)*lr_scheduler"),
    pytest.mark.filterwarnings("ignore:(.|\n)*no multi-node optimizer trains them"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    # Of hooks that it compiles, to be compiled without a warning one day.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
    pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True"),
    pytest.mark.filterwarnings("ignore:Lazy modules"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max"),
    pytest.mark.filterwarnings("ignore:The epoch parameter in"),  # of SequentialLR in torch 2.6
]


FIRST, *OTHERS = SCHEDULES


def _cases() -> Iterator[pytest.param]:
    """All schedules and numbers of ranks, of which every change is tested by some.

    Every script runs under the first schedule on several ranks, under one of the others, which take
    turns, and alone on its rank under one.
    """
    for number, script in enumerate(all_scripts()):
        of_every_change = {
            (FIRST, max(WORLD_SIZES)),
            (OTHERS[number % len(OTHERS)], max(WORLD_SIZES)),
            (SCHEDULES[number % len(SCHEDULES)], 1),
        }
        for schedule in SCHEDULES:
            for world_size in WORLD_SIZES:
                is_slow = (schedule, world_size) not in of_every_change
                if is_slow and script.is_slow and world_size == 1:
                    continue
                marks = [pytest.mark.slow] if is_slow else []
                yield pytest.param(
                    script,
                    schedule,
                    world_size,
                    id=f"{script.name}-{schedule}-{world_size}",
                    marks=marks,
                )


@pytest.mark.parametrize(("script", "schedule", "world_size"), list(_cases()))
def test_as_one_process(script: Script, schedule: str, world_size: int) -> None:
    if script.program.__module__ == compiled.__name__:
        torch.compiler.reset()  # each stands for a process of its own
    results = on_ranks(script, world_size, schedule)
    outcome = script.outcome(schedule, world_size)
    if isinstance(outcome, Refused):
        check_refused(outcome, results)
    else:
        check_exact(script, results)


@pytest.mark.parametrize("script", all_scripts(), ids=lambda script: script.name)
def test_a_script_detects_that_nothing_is_exchanged(script: Script) -> None:
    for found in on_isolated_ranks(script, 2):
        assert differences(script, found)
