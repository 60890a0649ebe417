"""Resuming from a saved state: every codec and schedule, on the same and other numbers of ranks."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from tests.contracts.broken import resumes as broken
from tests.contracts.suites.communicator_contracts import ContractError
from tests.contracts.suites.resume_contracts import (
    Left,
    Recipe,
    check_other_ranks,
    check_resume_is_exact,
    leave,
)
from tests.ranks import run_placed
from torchmn.cluster import Topology
from torchmn.comm.codecs import CODECS
from torchmn.exchange.optimizer.create import SCHEDULES
from torchmn.exchange.schedules import (
    BlockMomentum,
    DiLoCo,
    DoubleBuffering,
    EveryStep,
    PeriodicAverage,
    Warmup,
)
from torchmn.testing import run_ranks

PLACEMENTS = {
    "1": ("flat", Topology.blocks([1])),
    "2": ("flat", Topology.blocks([2])),
    "3": ("naive", Topology.blocks([3])),
    "3+1": ("hierarchical", Topology.blocks([3, 1])),
    "2+2": ("two_dimensional", Topology.blocks([2, 2])),
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


blocks = partial(Recipe, num_samples=48)
by_name = {
    name: Recipe(schedule=lambda _, name=name: name) for name in ("every_step", "double_buffering")
}


BLOCKS = {
    "periodic_average": blocks(schedule=lambda _: PeriodicAverage(36)),
    "block_momentum": blocks(schedule=lambda _: BlockMomentum(36)),
    "diloco": blocks(schedule=lambda _: DiLoCo(36), inner=adamw),
    "overlap": blocks(schedule=lambda _: PeriodicAverage(36, overlap_steps=2)),
    "eager": blocks(schedule=lambda _: DiLoCo(36, overlap_steps=2, eager=True)),
    "fragments": blocks(schedule=lambda _: DiLoCo(36, num_fragments=3, overlap_steps=1)),
    "warm": blocks(schedule=lambda _: Warmup(40, BlockMomentum(36, overlap_steps=1))),
}
by_name["eager_double_buffering"] = Recipe(schedule=lambda _: DoubleBuffering(eager=True))
IN_NODES = blocks(schedule=lambda _: DiLoCo(24, intra_node="every_step", num_fragments=2))
EVERY = {**by_name, **BLOCKS}
OTHERS = {
    "codec_warmup": Recipe(codec="1bit", schedule=lambda _: Warmup(40, EveryStep())),
    "accumulation": Recipe(codec="int4", num_passes=3),
    "accumulation_in_blocks": replace(BLOCKS["overlap"], num_passes=2),
    "accumulation_late": replace(by_name["double_buffering"], num_passes=2, codec="int8"),
    "clipped": Recipe(codec="int8", max_grad_norm=0.01, zero_fill=False),
    "scaled": Recipe(scales=True, inner=adamw),
    "scaled_in_blocks": replace(BLOCKS["warm"], scales=True),
    "ranks_weigh_equally": Recipe(codec="1bit", weight="rank"),
}
FEW = (3, 6)


# ---- on the same number of ranks ----


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_continues_with_the_same_bits(codec: str) -> None:
    run_placed(PLACEMENTS["2"], lambda comm: check_resume_is_exact(comm, Recipe(codec=codec)))
    for label in ("1", "3+1"):
        run_placed(
            PLACEMENTS[label], lambda comm: check_resume_is_exact(comm, Recipe(codec=codec), FEW)
        )


@pytest.mark.parametrize("codec", [None, "1bit"])
@pytest.mark.parametrize("name", EVERY)
def test_every_schedule_continues_with_the_same_bits(name: str, codec: str | None) -> None:
    recipe = replace(EVERY[name], codec=codec)
    run_placed(PLACEMENTS["2"], lambda comm: check_resume_is_exact(comm, recipe))


@pytest.mark.parametrize("name", EVERY)
def test_with_power_sgd_and_three_ranks(name: str) -> None:
    recipe = replace(EVERY[name], codec="power_sgd")
    run_placed(PLACEMENTS["3"], lambda comm: check_resume_is_exact(comm, recipe, FEW[1:]))


@pytest.mark.parametrize("name", OTHERS)
def test_what_goes_with_them(name: str) -> None:
    run_placed(PLACEMENTS["2"], lambda comm: check_resume_is_exact(comm, OTHERS[name]))


@pytest.mark.parametrize("codec", [None, "1bit"])
def test_blocks_between_nodes(codec: str | None) -> None:
    run_placed(
        PLACEMENTS["2+2"], lambda comm: check_resume_is_exact(comm, replace(IN_NODES, codec=codec))
    )


def test_nothing_is_left_out() -> None:
    assert {*EVERY} >= SCHEDULES.keys() - {"parameter_server"}


# ---- on other ranks ----


def on_others(recipe: Recipe, num_passes: int, labels: tuple[str, ...], others: tuple[str, ...]):  # type: ignore[no-untyped-def]
    for label in labels:
        left: Left = run_placed(
            PLACEMENTS[label], partial(leave, recipe=recipe, num_passes=num_passes)
        )[0]
        for other in others:
            run_placed(PLACEMENTS[other], partial(check_other_ranks, recipe=recipe, left=left))


SIZES = ("1", "2", "3", "4")
PLACEMENTS["4"] = ("flat", Topology.blocks([4]))


@pytest.mark.parametrize("name", EVERY)
def test_other_numbers_of_ranks_continue_as_before(name: str) -> None:
    """Without what differs between ranks by chance: to rounding."""
    recipe = replace(EVERY[name], has_noise=False)
    if name == "every_step":
        on_others(recipe, 7, SIZES, SIZES)
    else:
        on_others(recipe, 7, ("3",), ("1", "2", "4"))
        on_others(recipe, 7, ("1",), ("2",))


@pytest.mark.parametrize("codec", ["int8", "1bit", "power_sgd"])
def test_what_is_lost_stays_in_the_residual(codec: str) -> None:
    on_others(Recipe(codec=codec), 7, ("2", "3"), ("1", "2", "3+1"))
    on_others(Recipe(codec=codec), 7, ("3+1",), ("3",))


def test_where_each_rank_encodes_a_part() -> None:
    on_others(Recipe(codec="1bit"), 7, ("3",), ("2+2",))
    on_others(Recipe(codec="1bit"), 7, ("2+2",), ("3",))


@pytest.mark.parametrize("name", BLOCKS)
def test_what_blocks_lose_stays_in_the_residual(name: str) -> None:
    recipe = replace(BLOCKS[name], codec="1bit")
    on_others(recipe, 8, ("2",), ("1", "3"))


@pytest.mark.parametrize("name", ["accumulation", "accumulation_in_blocks", "ranks_weigh_equally"])
def test_inside_of_a_step(name: str) -> None:
    on_others(OTHERS[name], 7, ("2",), ("1", "4"))


def test_accumulated_gradients_are_shared_out() -> None:
    recipe = Recipe(num_passes=3, has_noise=False, num_samples=48)
    on_others(recipe, 7, ("1", "3"), ("2", "4"))


def test_nodes_that_train_as_one_worker() -> None:
    recipe = replace(IN_NODES, has_noise=False)
    on_others(recipe, 7, ("2+2", "2"), ("2+2", "3", "1"))


# ---- wrong ones ----


@pytest.mark.parametrize("wrong", broken.INEXACT, ids=lambda wrong: wrong.__name__)
def test_a_wrong_resume_is_caught(wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = broken.INEXACT[wrong] or wrong(monkeypatch)
    with pytest.raises(ContractError):
        run_ranks(lambda comm: check_resume_is_exact(comm, recipe), 2)


@pytest.mark.parametrize("wrong", broken.LOSING, ids=lambda wrong: wrong.__name__)
def test_a_wrong_number_of_ranks_is_caught(wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = broken.LOSING[wrong] or wrong(monkeypatch)
    left = run_ranks(lambda comm: leave(comm, recipe, 7), 2)[0]
    with pytest.raises(ContractError):
        run_ranks(lambda comm: check_other_ranks(comm, recipe, left), 3)
