"""Synchronizing buffers, so that all ranks evaluate or save the same model.

In data-parallel training each rank has its own running statistics of batch normalization. Results
of shards that each rank evaluates with its own statistics would not belong to any single model.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from torchmn.base.errors import RankMismatchError, raise_if_unknown
from torchmn.comm import Communicator
from torchmn.exchange.replicas import persistent_buffers

BufferRule = Literal["average", "rank0", "local"]
BUFFER_RULES: tuple[BufferRule, ...] = ("average", "rank0", "local")


def sync_buffers_(
    models: Iterable[nn.Module], comm: Communicator, rule: BufferRule = "average"
) -> None:
    """Give all ranks the same buffers, in place. *Collective* unless the rule is ``local``.

    Buffers with ``persistent=False``, such as caches, are left as they are on each rank.

    Args:
        models: modules with the same buffers on every rank.
        comm: the ranks that participate.
        rule: ``average``: floating-point buffers become their mean over ranks, taken in float64,
            and all others are copied from rank 0. ``rank0``: all are copied from rank 0. ``local``:
            nothing is done.

    Raises:
        UnknownNameError: no such rule.
        RankMismatchError: the ranks' buffers differ in number or shape.

    Example:
        >>> model = torch.nn.BatchNorm1d(2)
        >>> torchmn.train.evaluation.sync_buffers_([model], comm)
    """
    raise_if_unknown("rule for buffers", rule, BUFFER_RULES)
    if rule == "local" or comm.size == 1:
        return
    found = (own.get() for model in models for own in persistent_buffers(model))
    buffers = list(dict.fromkeys(buffer for buffer in found if buffer is not None))
    averaged = [b for b in buffers if rule == "average" and _has_mean(b)]
    taken = [b for b in buffers if not (rule == "average" and _has_mean(b))]
    with torch.no_grad():
        _average_(averaged, comm)
        _take_from_rank_0_(taken, comm)


def _average_(buffers: list[Tensor], comm: Communicator) -> None:
    is_there = all(buffer.device == comm.device for buffer in buffers)
    where = comm.device if is_there else torch.device("cpu")
    parts = [_real(buffer).to(where, torch.float64).flatten() for buffer in buffers]
    flat = torch.cat([torch.zeros(0, dtype=torch.float64, device=where), *parts])
    means = comm.allreduce(flat, "mean").split([part.numel() for part in parts])
    for buffer, mean in zip(buffers, means, strict=True):
        real = _real(buffer)
        real.copy_(mean.view(real.shape))


def _take_from_rank_0_(buffers: list[Tensor], comm: Communicator) -> None:
    own = [buffer.detach().cpu() for buffer in buffers]
    theirs = comm.bcast_obj(own if comm.rank == 0 else None)
    if [value.shape for value in theirs] != [value.shape for value in own]:
        raise RankMismatchError(
            f"{comm.rank_label}: rank 0 has buffers of shapes {_shapes(theirs)}, this rank of "
            f"{_shapes(own)}. All ranks must build the same model."
        )
    for buffer, value in zip(buffers, theirs, strict=True):
        buffer.copy_(value)


def _shapes(tensors: list[Tensor]) -> list[list[int]]:
    return [list(tensor.shape) for tensor in tensors]


def _has_mean(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
