"""A linear layer whose features are divided among ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchmn.comm import Communicator
from torchmn.nn.parallel_layer import ParallelLayer, Split


class ParallelLinear(ParallelLayer, nn.Linear):
    """`torch.nn.Linear` of which each rank holds and computes a part.

    All ranks give it the same input ``(..., in_features)`` and get the same output
    ``(..., out_features)``. Forward and backward are *collective*. Output, gradients and, under the
    same ``torch.manual_seed``, initial values are those of the whole layer in one process;
    ``weight`` and ``bias`` are this rank's part. Features need not be a multiple of the ranks.

    Args:
        in_features, out_features, bias, device, dtype: as in torch, of the whole layer.
        comm: the ranks that hold it together.
        split: ``output``: each rank has some output features, which are gathered at the end;
            ``input``: some input features, and the outputs are added up. Divide the larger of the
            two; ``input`` sends less where outputs are few.

    Raises UsageError: fewer features than ranks.

    >>> import torchmn
    >>> comm = torchmn.create_communicator()
    >>> layer = torchmn.links.ParallelLinear(3, 7, comm, split="output")
    >>> layer(torch.rand(2, 3)).shape
    torch.Size([2, 7])
    >>> comm.finalize()
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        bias: bool = True,
        *,
        split: Split = "output",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self._divide(comm, split)

    def _channel_dim(self, x: Tensor) -> int:
        return x.dim() - 1

    def _apply_part(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self.weight, bias)
