"""Tests that are the program of one rank, run on several as threads."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchmn.cluster import Topology
from torchmn.testing import run_ranks


def on_ranks(*sizes: int, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Call a test with ``comm`` on each rank of a world of that size, or of each of the sizes.

    What it returns must be the same on all ranks, tensors bit by bit. The options are those of
    `run_ranks`.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, world_size: int = sizes[0], **arguments: Any) -> None:
            results = run_ranks(
                lambda comm: test(*args, comm=comm, **arguments), world_size, **options
            )
            for rank, result in enumerate(results):
                assert same(result, results[0]), f"ranks 0 and {rank} of {world_size} differ"

        asked = [p for p in inspect.signature(test).parameters.values() if p.name != "comm"]
        if len(sizes) > 1:
            asked.append(inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", sizes)(run) if len(sizes) > 1 else run

    return decorate


def run_placed(placement: tuple[Any, Topology], function: Callable[..., Any]) -> list[Any]:
    """Run ``function(comm)`` on the ranks of a placement: the name of a route, and hosts."""
    name, topology = placement
    return run_ranks(function, topology.size, name=name, topology=topology)


def same(one: Any, other: Any) -> bool:
    """Equal values; of tensors also dtype and every element."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)
