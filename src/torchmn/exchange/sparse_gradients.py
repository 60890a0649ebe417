"""Sparse gradients, such as those of ``nn.Embedding(sparse=True)``: rows are gathered, not summed.

For a parameter of R rows, of which rank i has a gradient for the rows I_i, with weights w_i:

    gathered:    all (I_i, w_i / sum_j w_j  g_i), and coalesced to their sum
    densified:   where that would move more bytes, a sum of R rows, of which the rows of the union
                 of all I_i are taken

The gradient is sparse in either case, and holds the same rows as that of one process on the whole
batch: optimizers such as `torch.optim.SparseAdam` update those and no others. Horovod gathers
always, unless ``sparse_as_dense`` is given. Codecs do not apply: rows travel as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from torchmn.base.errors import UnsupportedError
from torchmn.cluster.units import listed
from torchmn.comm import Communicator

_INDEX_BYTES = 8


def sparse_parameters(models: Sequence[nn.Module]) -> set[nn.Parameter]:
    """The weights of embeddings created with ``sparse=True``, whose gradients are sparse. Local."""
    return {
        cast(nn.Parameter, module.weight)
        for model in models
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }


def mean_sparse_gradients(
    comm: Communicator,
    parameters: Sequence[nn.Parameter],
    weight: float,
    *,
    zero_fill: bool,
    reduction: Literal["mean", "sum"],
) -> dict[nn.Parameter, Tensor | None]:
    """Return the weighted mean, or the sum, over ranks of each ``p.grad``. *Collective.*

    A rank with weight 0 contributes nothing. If no rank has a gradient the mean is None, or, with
    ``zero_fill``, a sparse tensor without rows. Raises UnsupportedError on all ranks: a gradient is
    sparse in more than its first dim.
    """
    own = [_rows_of(parameter, weight) for parameter in parameters]
    # All ranks get the same facts, and so all choose the same way for each parameter: to gather
    # rows or to sum.
    facts = torch.tensor([[weight, *map(_num_rows, own)]], dtype=torch.float64, device="cpu")
    gathered = torch.cat(list(comm.allgather(facts)))
    _raise_if_refused(comm, parameters, gathered[:, 1:])
    total = float(gathered[:, 0].sum())
    # Divided before the sum, which would overflow in 16 bits.
    factor = weight / (total if total and reduction == "mean" else 1.0)
    means: dict[nn.Parameter, Tensor | None] = {}
    for parameter, rows, counts in zip(parameters, own, gathered.T[1:], strict=True):
        num_rows = int(counts.sum() - (counts > 0).sum())
        indices, values = rows if isinstance(rows, tuple) else _no_rows(parameter)
        if counts.any() and total:
            means[parameter] = _sum(comm, parameter, indices, values * factor, num_rows)
        elif zero_fill:
            means[parameter] = sparse_gradient(parameter, indices, values)
        else:
            means[parameter] = None
    return means


_REFUSED = -1.0
"""Stands for a number of rows if the gradient is sparse in more than its first dim."""


def _rows_of(parameter: nn.Parameter, weight: float) -> tuple[Tensor, Tensor] | float | None:
    """The indices of the rows with a gradient on this rank, (n,), and their values, (n, ...).

    None if there is no gradient to send, `_REFUSED` if it cannot be sent.
    """
    grad = parameter.grad
    if grad is None or weight == 0.0:
        return None
    if grad.layout == torch.strided:  # given by hand, or zeroed: as if every row were there
        indices = torch.arange(parameter.shape[0], device=grad.device)
        return indices, grad.detach()
    grad = grad.detach().coalesce()
    return (grad.indices()[0], grad.values()) if grad.sparse_dim() == 1 else _REFUSED


def _num_rows(rows: tuple[Tensor, Tensor] | float | None) -> float:
    """The number of rows plus 1; 0 if there is no gradient; or `_REFUSED`."""
    if rows is None:
        return 0.0
    return 1.0 + rows[0].numel() if isinstance(rows, tuple) else rows


def _raise_if_refused(
    comm: Communicator, parameters: Sequence[nn.Parameter], counts: Tensor
) -> None:
    """Raise UnsupportedError on all ranks if a rank has a gradient that cannot be sent."""
    for parameter, of_ranks in zip(parameters, counts.T, strict=True):
        ranks = [rank for rank, count in enumerate(of_ranks.tolist()) if count == _REFUSED]
        if ranks:
            raise UnsupportedError(
                f"{comm.rank_label}: the gradient of a parameter of shape {list(parameter.shape)} "
                f"is sparse in more than its first dim on {listed('rank', ranks)}. Only gradients "
                "that are sparse in their first dim, as those of nn.Embedding(sparse=True), are "
                "exchanged."
            )


def _no_rows(parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    indices = torch.empty(0, dtype=torch.int64, device=parameter.device)
    return indices, parameter.detach()[:0]


def _sum(
    comm: Communicator, parameter: nn.Parameter, indices: Tensor, values: Tensor, num_rows: int
) -> Tensor:
    """Return the coalesced sum over ranks. *Collective.*

    ``num_rows`` is the number of rows of all ranks added up.
    """
    row_nbytes = parameter.nbytes // max(1, parameter.shape[0])
    gathered_nbytes = num_rows * (row_nbytes + _INDEX_BYTES)
    if gathered_nbytes <= 2 * parameter.nbytes + num_rows * _INDEX_BYTES:
        indices = torch.cat([i.to(parameter.device) for i in comm.allgather(indices)])
        values = torch.cat([v.to(parameter.device) for v in comm.allgather(values)])
        return sparse_gradient(parameter, indices, values)
    dense = torch.zeros_like(parameter, requires_grad=False).index_add_(0, indices, values)
    dense = comm.allreduce(dense)
    union = torch.cat([i.to(parameter.device) for i in comm.allgather(indices)]).unique()
    return sparse_gradient(parameter, union, dense[union])


def sparse_gradient(parameter: nn.Parameter, indices: Tensor, values: Tensor) -> Tensor:
    """Return a coalesced sparse gradient from row ``indices``, (n,), and ``values``, (n, ...)."""
    return torch.sparse_coo_tensor(
        indices[None], values, parameter.shape, check_invariants=False
    ).coalesce()
