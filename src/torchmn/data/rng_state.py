"""The random generators of a rank: Python's, numpy's, torch's on the CPU and on its GPU.

On another number of ranks, a rank that existed before continues its own streams. A new rank gets
streams derived from the seed of the saved run's rank 0, the step and its rank, so that no two ranks
draw the same numbers and resuming is reproducible.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torchmn.base.errors import DataError

in_turn = threading.RLock()
"""For ranks that are threads, which share generators. torch locks a generator while it makes the
tensor of its state. There the garbage collector may run and wait for the interpreter, and a thread
that has the interpreter and waits for the generator would wait forever."""


def capture(device: torch.device) -> dict[str, Any]:
    """The state of all generators, as tensors, numbers and lists of them. Local."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    with in_turn:
        state = {
            "python": [version, list(numbers), gauss],
            "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
            "torch": torch.get_rng_state(),
            "seed": torch.initial_seed(),
        }
        if device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def check(state: Mapping[str, Any]) -> None:
    """Raise DataError if these are not the states of generators. Local; no generator is changed."""
    try:
        random.Random().setstate(_python(state))
        np.random.RandomState().set_state(_numpy(state))
        torch.Generator(device="cpu").set_state(state["torch"])
        int(state["seed"])
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as e:
        raise DataError(
            f"the states of the random generators are not valid ({type(e).__name__}: {e})"
        ) from e


def restore(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the generators. Local.

    A GPU whose state was not saved (the run has moved to GPUs) keeps its stream.
    """
    random.setstate(_python(state))
    np.random.set_state(_numpy(state))
    with in_turn:
        torch.set_rng_state(state["torch"])
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], device)


def start(seed: int | str, step: int, rank: int, device: torch.device) -> None:
    """Seed the generators of a rank that did not exist when the state was saved. Local."""
    text = f"torchmn {seed} {step} {rank}".encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    random.seed(number)
    np.random.seed(number % 2**32)
    with in_turn:
        torch.default_generator.manual_seed(number % 2**63)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(number % 2**63)


def _python(state: Mapping[str, Any]) -> tuple[Any, ...]:
    version, numbers, gauss = state["python"]
    return version, tuple(numbers), gauss


def _numpy(state: Mapping[str, Any]) -> tuple[Any, ...]:
    name, keys, *rest = state["numpy"]
    return name, np.asarray(keys, dtype=np.uint32), *rest
