"""A convolution whose channels are divided among ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchmn.comm import Communicator
from torchmn.errors import UnsupportedError
from torchmn.nn.parallel_layer import ParallelLayer, Split


class ParallelConv2d(ParallelLayer, nn.Conv2d):
    """`torch.nn.Conv2d` of which each rank holds and computes some channels.

    All ranks give it the same images ``(batch, in_channels, height, width)`` and get the same
    output. Forward and backward are *collective*. Output, gradients and, under the same
    ``torch.manual_seed``, initial values are those of the whole layer in one process; ``weight``
    and ``bias`` are this rank's part. Channels need not be a multiple of the ranks.

    Args:
        in_channels, out_channels, kernel_size: as in torch, of the whole layer.
        comm: the ranks that hold it together.
        split: ``output``: each rank has some output channels, which are gathered at the end;
            ``input``: some input channels, and the outputs are added up.
        options: those of `torch.nn.Conv2d`, such as ``stride``, ``padding`` and ``bias``.

    Raises UsageError: fewer channels than ranks; UnsupportedError: ``groups`` is not 1.

    Example:
        >>> layer = torchmn.links.ParallelConv2d(3, 8, 3, comm, padding=1)
        >>> layer(torch.rand(2, 3, 4, 4)).shape
        torch.Size([2, 8, 4, 4])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        comm: Communicator,
        *,
        split: Split = "output",
        **options: Any,
    ) -> None:
        nn.Conv2d.__init__(self, in_channels, out_channels, kernel_size, **options)
        if self.groups != 1:
            raise UnsupportedError(
                f"ParallelConv2d with groups={self.groups}: channels of different groups are "
                "independent already. Use groups=1, or nn.Conv2d."
            )
        self._divide(comm, split)

    def _channel_dim(self, x: Tensor) -> int:
        return x.dim() - 3

    def _apply_part(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = self._conv_forward(x, self.weight, bias)
        return y
