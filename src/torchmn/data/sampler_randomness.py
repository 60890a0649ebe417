"""The random numbers that a sampler draws from, to have it draw the same order again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def capture(sampler: object) -> dict[str, Any]:
    """The state of every generator that ``sampler`` may use, as tensors and numbers. Local.

    These are the process's own (torch's on the CPU, Python's, numpy's) and the torch generators
    that the sampler, or the sampler in it, has as its ``generator``.
    """
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "generators": [generator.get_state() for generator in _generators(sampler)],
    }


@contextmanager
def replayed(state: Mapping[str, Any] | None, sampler: object) -> Iterator[None]:
    """Draw from the numbers of a `capture` inside. Local; does nothing for None.

    Afterwards the process's own generators are as before, and the sampler's are where the draws
    have left them.
    """
    if state is None:
        yield
        return
    before = capture(None)
    for generator, own in zip(_generators(sampler), state["generators"], strict=True):
        generator.set_state(own)
    _set_process(state)
    try:
        yield
    finally:
        _set_process(before)


def _set_process(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    name, keys, position, has_gauss, cached = state["numpy"]
    torch.set_rng_state(state["torch"])
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))


def _generators(sampler: object) -> list[torch.Generator]:
    """Those of the sampler, of the one that it draws from, and so on; each once."""
    found: list[torch.Generator] = []
    seen: list[object] = []
    while sampler is not None and not any(sampler is other for other in seen):
        seen.append(sampler)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found:
            found.append(generator)
        sampler = getattr(sampler, "sampler", None)
    return found
