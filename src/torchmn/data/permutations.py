"""Permutations of data sets and their seeds, the same on every machine and numpy version.

numpy guarantees the streams of RandomState and SeedSequence, but not those of Generator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchmn.base.errors import UsageError

Order = np.ndarray[Any, np.dtype[np.int64]]
SEED_RULE = "A seed must be an integer from 0 to 2**32 - 1, or None."


def permutation(length: int, seed: int) -> Order:
    """The permutation of ``length`` indices that Chainer and ChainerMN draw for a seed.

    Raises UsageError: the seed is outside 0 .. 2**32 - 1.
    """
    if not is_seed(seed):
        raise UsageError(f"{SEED_RULE} It is {seed!r}.")
    return np.random.RandomState(int(seed)).permutation(length).astype(np.int64)


def keyed_permutation(length: int, *key: int) -> Order:
    """One permutation of ``length`` indices for integers of 0 or more, such as (seed, epoch)."""
    bits = np.random.MT19937(np.random.SeedSequence(key))
    return np.random.RandomState(bits).permutation(length).astype(np.int64)


def is_seed(value: object) -> bool:
    """Whether a value can seed `permutation`."""
    return isinstance(value, (int, np.integer)) and 0 <= int(value) < 2**32


def draw_seed() -> int:
    """A new seed, 0 .. 2**32 - 1, from the operating system's entropy."""
    return int(np.random.SeedSequence().generate_state(1)[0])
