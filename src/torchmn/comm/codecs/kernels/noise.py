"""Random numbers for stochastic rounding: a function of seed, step, parameter and element.

They do not depend on how parameters are put into buckets and stripes, they are the same for every
kernel, and a counter is all the state there is.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchmn.comm.codecs.layout import Layout


@dataclass(frozen=True)
class Noise:
    """The random numbers of one encoding: element i of a parameter hashes key + i."""

    seed: int
    step: int
    side: str

    def keys(self, stripe: Layout) -> npt.NDArray[np.uint32]:
        """(num_segments,): the first counter of each parameter."""
        words = (f"{self.seed}/{self.step}/{self.side}/{s.name}" for s in stripe.segments)
        return np.array([zlib.crc32(word.encode()) for word in words], dtype=np.uint32)
