"""Sources of data that is in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchmn.cntk.readers.arrays import ArrayChunk
from torchmn.cntk.readers.minibatch_plan import INFINITELY_REPEAT
from torchmn.cntk.readers.minibatch_source import MinibatchSource


class MinibatchSourceFromData(MinibatchSource):
    """Minibatches of data in memory, in order unless ``randomize`` is True. Local.

    Args:
        data_streams: by stream name a NumPy array or tensor ``(num_sequences, *shape)`` of
            sequences of one sample, a list of arrays ``(length, *shape)``, one for each sequence,
            or a sparse matrix (SciPy's or ``torch.sparse_csr``) of one row for each sequence. A
            tuple ``(value, type)``, as in CNTK, is its value. float64 becomes float32; integers
            stay integers, as labels for PyTorch's losses.
        max_samples: see `MinibatchSource`.
        max_sweeps: see `MinibatchSource`.
        randomize: draw a new order for each sweep.
        randomization_seed: 0 or more; the same on all ranks.

    Raises UsageError: streams have different numbers of sequences, or a value is of no such type.

    >>> source = MinibatchSourceFromData({"x": torch.rand(100, 3), "y": torch.zeros(100, 1)})
    >>> source.next_minibatch(10, {"x": "x"})["x"].data.shape
    torch.Size([10, 3])
    """

    def __init__(
        self,
        data_streams: Mapping[str, Any],
        max_samples: int = INFINITELY_REPEAT,
        max_sweeps: int = INFINITELY_REPEAT,
        *,
        randomize: bool = False,
        randomization_seed: int = 0,
    ) -> None:
        super().__init__(
            ArrayChunk(data_streams),
            max_samples,
            max_sweeps,
            randomize=randomize,
            randomization_seed=randomization_seed,
        )
