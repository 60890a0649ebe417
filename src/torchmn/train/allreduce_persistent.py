"""Synchronizing buffers before evaluation and snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytorch_pfn_extras.training import extension
from torch import nn

from torchmn.train.evaluation import sync_buffers_
from torchmn.train.evaluation.buffers import BufferRule

if TYPE_CHECKING:
    from torchmn.comm import Communicator


class AllreducePersistent(extension.Extension):
    """Averages the floating-point buffers of a model over ranks, in place. *Collective.*

    Integer buffers are copied from rank 0. It runs once per epoch, before evaluators and snapshots.
    The name is ChainerMN's, whose "persistents" are PyTorch's buffers.

    Example:
        >>> model = torch.nn.BatchNorm1d(3)
        >>> torchmn.AllreducePersistent(model, comm)()
    """

    trigger = (1, "epoch")
    priority = extension.PRIORITY_WRITER + 1

    def __init__(
        self, model: nn.Module, comm: Communicator, *, buffers: BufferRule = "average"
    ) -> None:
        self._model = model
        self._comm = comm
        self._rule: BufferRule = buffers

    def __call__(self, manager: Any = None) -> None:
        """Average the buffers."""
        sync_buffers_([self._model], self._comm, self._rule)
