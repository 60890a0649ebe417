"""One stream of one minibatch, of one partition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from torchmn.base.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class MinibatchData:
    """The samples of one stream in a minibatch: this partition's part of it.

    Args:
        data: dense ``(num_samples, *shape)``: all sequences one after another; sparse: a
            ``torch.sparse_csr`` tensor ``(num_samples, dimension)``.
        num_sequences: sequences of this partition; 0 if its part is empty.
        num_samples: samples of this stream and partition.
        sweep_end: whether this minibatch, over all partitions, reached the end of a sweep.
        lengths: lengths of sequences, int64 ``(num_sequences,)`` on the CPU; None if each sequence
            of the data has one sample.
        is_first: with ``truncation_length``, for each piece whether it begins a sequence, so that a
            recurrent state starts from zero; bool ``(num_sequences,)`` on the CPU. None otherwise.

    >>> from torchmn.cntk.readers import MinibatchData
    >>> data = MinibatchData(torch.ones(4, 2), num_sequences=4, num_samples=4)
    >>> data.data.shape, data.sweep_end
    (torch.Size([4, 2]), False)
    """

    data: torch.Tensor
    num_sequences: int
    num_samples: int
    sweep_end: bool = False
    lengths: torch.Tensor | None = None
    is_first: torch.Tensor | None = None

    @property
    def end_of_sweep(self) -> bool:
        """CNTK's other name of ``sweep_end``."""
        return self.sweep_end

    @property
    def is_sparse(self) -> bool:
        """Whether ``data`` is a sparse CSR tensor."""
        return self.data.layout == torch.sparse_csr

    def __len__(self) -> int:
        return self.num_sequences

    def as_sequences(self) -> list[torch.Tensor]:
        """The sequences of a dense stream, each ``(length, *shape)``."""
        self._raise_if_sparse("as_sequences")
        if self.lengths is None:
            return list(self.data.split(1)) if self.num_samples else []
        return list(self.data.split(self.lengths.tolist()))

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A dense stream as ``(num_sequences, longest, *shape)``, filled up with zeros, and a mask.

        The mask is bool ``(num_sequences, longest)``, True where there is a sample.
        """
        self._raise_if_sparse("padded")
        device = self.data.device
        if self.lengths is None:
            mask = torch.ones(self.num_sequences, 1, dtype=torch.bool, device=device)
            return self.data.unsqueeze(1), mask
        longest = int(self.lengths.max()) if self.num_sequences else 0
        mask = torch.arange(longest, device="cpu") < self.lengths.unsqueeze(1)
        mask = mask.to(device)
        padded = self.data.new_zeros(self.num_sequences, longest, *self.data.shape[1:])
        padded[mask] = self.data
        return padded, mask

    def asarray(self) -> np.ndarray[Any, Any]:
        """A dense stream as a NumPy array ``(num_samples, *shape)``."""
        self._raise_if_sparse("asarray")
        array: np.ndarray[Any, Any] = self.data.cpu().numpy()
        return array

    def to(self, device: torch.device | str | None) -> MinibatchData:
        """Move the samples to a device; ``lengths`` and ``is_first`` stay on the CPU."""
        if device is None or self.data.device == torch.device(device):
            return self
        return replace(self, data=self.data.to(device, non_blocking=True))

    def _raise_if_sparse(self, method: str) -> None:
        if self.is_sparse:
            raise UnsupportedError(
                f"{method}() needs a dense stream, and this one is sparse. Use .data, a "
                "torch.sparse_csr tensor (num_samples, dimension), or .data.to_dense()."
            )


def as_in_other_parts(
    streams: Mapping[str, MinibatchData], has_one_sample: Mapping[str, bool]
) -> dict[str, MinibatchData]:
    """A part of a minibatch whose streams have lengths if those of all parts have. Local.

    Args:
        streams: the streams of this part, by name.
        has_one_sample: whether each sequence of a stream has one sample, where that is known.

    Example:
        >>> part = MinibatchData(torch.ones(2, 3), num_sequences=2, num_samples=2)
        >>> as_in_other_parts({"x": part}, {"x": False})["x"].lengths
        tensor([1, 1])
    """
    found = {}
    for name, part in streams.items():
        found[name] = part
        if part.lengths is None and not has_one_sample.get(name, True):
            lengths = torch.ones(part.num_sequences, dtype=torch.int64, device="cpu")
            found[name] = replace(part, lengths=lengths)
    return found
