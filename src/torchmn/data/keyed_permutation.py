"""Permutations that depend on integers alone, the same on every machine and numpy version.

numpy guarantees the streams of RandomState and SeedSequence, but not those of Generator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Order = np.ndarray[Any, np.dtype[np.int64]]


def keyed_permutation(length: int, *key: int) -> Order:
    """One permutation of ``length`` indices for integers of 0 or more, such as (seed, epoch)."""
    bits = np.random.MT19937(np.random.SeedSequence(key))
    return np.random.RandomState(bits).permutation(length).astype(np.int64)
