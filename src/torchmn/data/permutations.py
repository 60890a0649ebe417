"""Permutations of data sets and their seeds. See `torchmn.data.keyed_permutation`."""

from __future__ import annotations

import numpy as np

from torchmn.data.keyed_permutation import Order as Order
from torchmn.data.keyed_permutation import keyed_permutation
from torchmn.errors import UsageError

SEED_RULE = "A seed must be an integer from 0 to 2**32 - 1, or None."


def permutation(length: int, seed: int) -> Order:
    """The permutation of ``length`` indices that Chainer and ChainerMN draw for a seed.

    Raises UsageError: the seed is outside 0 .. 2**32 - 1.
    """
    if not is_seed(seed):
        raise UsageError(f"{SEED_RULE} It is {seed!r}.")
    return np.random.RandomState(int(seed)).permutation(length).astype(np.int64)


def epoch_permutation(length: int, seed: int, epoch: int) -> Order:
    """One permutation of ``length`` indices for (seed, epoch), both 0 or more."""
    return keyed_permutation(length, seed, epoch)


def is_seed(value: object) -> bool:
    """Whether a value can seed `permutation`."""
    return isinstance(value, (int, np.integer)) and 0 <= int(value) < 2**32


def draw_seed() -> int:
    """A new seed, 0 .. 2**32 - 1, from the operating system's entropy."""
    return int(np.random.SeedSequence().generate_state(1)[0])
