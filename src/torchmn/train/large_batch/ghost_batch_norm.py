"""Batch normalization over parts of a rank's batch.

Hoffer, Hubara and Soudry, *Train longer, generalize better*, 2017, arXiv 1705.08741, section 4.3
and algorithm 1. A large batch is divided into ghost batches, each of which is normalized by its own
mean and variance, as a small batch would be. The running statistics are updated by one ghost batch
after another; evaluation uses them as batch normalization does.

If each rank has ``ghost_batch`` samples, this is the same as plain batch normalization on ranks.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torchmn.base.errors import raise_if_no_count
from torchmn.base.torch_private import BatchNorm
from torchmn.nn.batch_norm import Model, convert_layers, revert_layers


class _Ghost(BatchNorm):
    """Base class of the layers for all dimensions."""

    ghost_batch: int

    def __init__(self, num_features: int, ghost_batch: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        raise_if_no_count("ghost_batch", ghost_batch, "a number of samples", least=2)
        self.ghost_batch = ghost_batch

    def forward(self, input: Tensor) -> Tensor:
        """Normalize; in training mode each ghost batch by itself. Local."""
        num_parts = _num_parts(input.shape[0], self.ghost_batch) if input.dim() else 0
        if not self.training or num_parts <= 1:
            return super().forward(input)
        # Before Python 3.12 `super()` without arguments fails inside of a comprehension.
        return torch.cat([super(_Ghost, self).forward(x) for x in input.tensor_split(num_parts)])

    def extra_repr(self) -> str:
        """The arguments of the layer."""
        of_torch: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{of_torch}, ghost_batch={self.ghost_batch}"


class GhostBatchNorm1d(_Ghost, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` by ghost batches; see `GhostBatchNorm2d`.

    Example:
        >>> GhostBatchNorm1d(3, 16)(torch.rand(64, 3)).shape
        torch.Size([64, 3])
    """


class GhostBatchNorm2d(_Ghost, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` whose training batches are normalized in parts. Local.

    Parameters, buffers, state dict and evaluation are those of the layer of torch. A batch is
    divided in order into ``batch / ghost_batch`` ghost batches, rounded to the nearest whole number
    (halves up); their sizes differ by at most one. None has less than two samples, except that of a
    batch of one.

    Args:
        num_features: channels, dimension 1 of the input.
        ghost_batch: samples that are normalized together, at least 2.
        options: as in torch: eps, momentum, affine, track_running_stats, device, dtype.

    Raises UsageError: ``ghost_batch`` is less than 2.

    >>> layer = GhostBatchNorm2d(3, 16)
    >>> layer(torch.rand(64, 3, 2, 2)).shape
    torch.Size([64, 3, 2, 2])
    """


class GhostBatchNorm3d(_Ghost, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` by ghost batches; see `GhostBatchNorm2d`.

    Example:
        >>> GhostBatchNorm3d(3, 16)(torch.rand(64, 3, 2, 2, 2)).shape
        torch.Size([64, 3, 2, 2, 2])
    """


_OF_TORCH: dict[type[nn.Module], type[_Ghost]] = {
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    nn.BatchNorm3d: GhostBatchNorm3d,
}


def convert_to_ghost_batch_norm(model: Model, ghost_batch: int) -> Model:
    """Make every `nn.BatchNorm1d`, 2d and 3d of a model a ghost one, in place. Local.

    Returns the model. The layers stay the same objects, with their parameters, statistics and
    hooks, so optimizers stay valid. Layers that already are ghost ones get the new size.

    Raises, before anything is changed:
        UnsupportedError: the model has batch normalization of another class, such as a multi-node
            one: use `torchmn.nn.revert_batch_norm` first.
        UsageError: ``ghost_batch`` is less than 2.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        >>> torchmn.train.large_batch.convert_to_ghost_batch_norm(model, 8)[1].ghost_batch
        8
    """
    raise_if_no_count("ghost_batch", ghost_batch, "a number of samples", least=2)
    for layer in convert_layers(model, _Ghost, _OF_TORCH):
        layer.ghost_batch = ghost_batch
    return model


def revert_ghost_batch_norm(model: Model) -> Model:
    """Make every ghost batch normalization one of torch, in place. Local. Returns the model.

    Raises UnsupportedError, before anything is changed: a layer is of a subclass, as after
    `torch.nn.utils.parametrize`.

    Example:
        >>> from torchmn.train import large_batch
        >>> model = large_batch.convert_to_ghost_batch_norm(torch.nn.BatchNorm1d(4), 8)
        >>> type(large_batch.revert_ghost_batch_norm(model)).__name__
        'BatchNorm1d'
    """
    for layer in revert_layers(model, _Ghost, _OF_TORCH):
        del layer.ghost_batch
    return model


def _num_parts(num_samples: int, ghost_batch: int) -> int:
    """Number of ghost batches of a batch; 0 if it is too small for one."""
    rounded = (2 * num_samples + ghost_batch) // (2 * ghost_batch)
    return min(rounded, num_samples // 2)
