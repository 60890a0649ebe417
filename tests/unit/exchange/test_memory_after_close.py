"""What an optimizer holds is freed when it is closed, without the garbage collector."""

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import torchmn
from tests.limits import limit
from torchmn.comm import Communicator
from torchmn.comm.codecs import CODECS
from torchmn.exchange.optimizer.create import SCHEDULES
from torchmn.testing import run_ranks

WAYS: dict[str, dict[str, Any]] = {
    **{name: {"schedule": name} for name in (*SCHEDULES, "auto")},
    **{name: {"codec": name} for name in CODECS},
    "samples": {"weight": "samples"},
    "views": {"gradient_as_bucket_view": True},
    "clipped": {"max_grad_norm": 1.0},
}


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)  # the first one of a process stays
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fold(
    comm: Communicator, way: dict[str, Any], *, closes: bool = True, fails: bool = False
) -> dict[str, weakref.ref[Any]]:
    """Train a little; what was made for it, by name."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = torchmn.create_multi_node_optimizer(inner, comm, model, **way)
    made = {"model": model, "inner": inner, "optimizer": optimizer, "reducer": optimizer.reducer}
    made |= {"schedule": optimizer.schedule, "parameter": model[0].weight}
    made |= {
        f"bucket {bucket.index} of set {number}": bucket
        for number, each in enumerate(optimizer.reducer.exchange.sets)
        for bucket in each.buckets
    }
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
    if fails:
        optimizer.zero_grad()
        with suppress(ValueError):
            raise ValueError(model(torch.ones(4, 6)).sum().item())
    optimizer.flush()
    if closes:
        optimizer.close()
    return {name: weakref.ref(thing) for name, thing in made.items()}


def kept(references: dict[str, weakref.ref[Any]]) -> list[str]:
    """What was not freed, when the thread of the engine has had the time to end its last call."""
    deadline_s = time.monotonic() + limit(2)
    while True:
        found = [name for name, reference in references.items() if reference() is not None]
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(0.001)


@pytest.mark.parametrize("way", WAYS)
def test_all_is_freed_after_close(way: str) -> None:
    assert run_ranks(lambda comm: kept(fold(comm, WAYS[way])), 2) == [[], []]


def test_an_exception_in_the_loop() -> None:
    assert run_ranks(lambda comm: kept(fold(comm, {}, fails=True)), 2) == [[], []]


def test_after_finalize() -> None:
    def rank_main(comm: Communicator) -> list[str]:
        references = fold(comm, {})
        comm.barrier()
        comm.finalize()
        return kept(references)

    assert run_ranks(rank_main, 2) == [[], []]


def test_buckets_that_were_laid_out_again() -> None:
    """A parameter that is unfrozen changes the layout: the buckets before are freed at once."""

    def rank_main(comm: Communicator) -> list[str]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
        model[0].requires_grad_(False)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = torchmn.create_multi_node_optimizer(inner, comm, model)
        (old,) = optimizer.reducer.exchange.sets
        references = {"set": weakref.ref(old), "bucket": weakref.ref(old.buckets[0])}
        del old
        model[0].requires_grad_(True)
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        found = kept(references)
        optimizer.close()
        return found

    assert run_ranks(rank_main, 2) == [[], []]


def test_without_close_the_collector_frees_it() -> None:
    """Until then the model keeps the optimizer: its gradients are exchanged."""

    def rank_main(comm: Communicator) -> dict[str, weakref.ref[Any]]:
        return fold(comm, {}, closes=False)

    for references in run_ranks(rank_main, 2):
        gc.collect()
        assert kept(references) == []
