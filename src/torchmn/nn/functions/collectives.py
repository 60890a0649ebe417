"""Differentiable collectives. The gradient is that of the sum of the losses of all ranks.

Where any rank passes a tensor that requires a gradient, the results of all ranks require one, and
all ranks run the backward together: it is a collective too. The ranks agree on this before the
collective, in one round, which is left out under ``torch.no_grad()``. Backward is written in the
same functions, so that it can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from torchmn.base.compiling import not_compiled
from torchmn.base.errors import raise_if_unknown
from torchmn.base.torch_private import current_graph_task_id
from torchmn.comm import Communicator
from torchmn.comm.collectives import allgather_for
from torchmn.nn.functions.exchange import Backward, Exchange, Gradients
from torchmn.nn.functions.recomputation import checkpoints

Op = Literal["sum", "mean"]
_Backward = Callable[[list[Tensor]], tuple[Gradients, Tensor | None]]


@not_compiled
def bcast(comm: Communicator, x: Tensor | None, root: int = 0) -> Tensor:
    """The root's tensor on every rank; backward sums the gradients of all ranks at the root.

    *Collective.* ``x`` of other ranks is ignored and may be None. Raises as `Communicator.bcast`;
    in backward CommunicationError: another rank does not run it.

    Example:
        >>> torchmn.functions.bcast(comm, torch.ones(2), root=0).tolist()
        [1.0, 1.0]
    """

    def backward(grads: list[Tensor]) -> tuple[Gradients, Tensor | None]:
        gathered = gather(comm, grads[0], root)
        if comm.rank != root:
            return (), cast(Tensor, gathered)
        return (torch.stack(cast("tuple[Tensor, ...]", gathered)).sum(0),), None

    inputs = (x,) if comm.rank == root else ()
    return _made("bcast", comm, inputs, lambda: (comm.bcast(x, root),), backward)[0]


@not_compiled
def gather(comm: Communicator, x: Tensor, root: int = 0) -> tuple[Tensor, ...] | Tensor:
    """All ranks' tensors at the root, in rank order; backward scatters their gradients.

    *Collective.* Shapes and dtypes may differ. Other ranks get a delegate variable, as from `send`.
    Raises as `Communicator.gather`; in backward CommunicationError: another rank does not run it.

    Example:
        >>> [each.tolist() for each in torchmn.functions.gather(comm, torch.ones(2), root=0)]
        [[1.0, 1.0]]
    """
    is_root = comm.rank == root

    def forward() -> tuple[Tensor, ...]:
        gathered = comm.gather(x, root)
        return (x.detach().new_zeros(()),) if gathered is None else gathered

    def backward(grads: list[Tensor]) -> tuple[Gradients, Tensor | None]:
        return (scatter(comm, grads if is_root else None, root),), None

    made = _made("gather", comm, (x,), forward, backward, is_delegate=not is_root)
    return made if is_root else made[0]


@not_compiled
def scatter(comm: Communicator, xs: Sequence[Tensor] | Tensor | None, root: int = 0) -> Tensor:
    """Rank i receives ``xs[i]`` of the root; backward gathers the gradients at the root.

    *Collective.* ``xs`` of other ranks is ignored and may be None. Raises as
    `Communicator.scatter`; in backward CommunicationError: another rank does not run it.

    Example:
        >>> torchmn.functions.scatter(comm, [torch.ones(2)] * comm.size, root=0).tolist()
        [1.0, 1.0]
    """
    is_root = comm.rank == root

    def backward(grads: list[Tensor]) -> tuple[Gradients, Tensor | None]:
        gathered = gather(comm, grads[0], root)
        if is_root:
            return cast("tuple[Tensor, ...]", gathered), None
        return (), cast(Tensor, gathered)

    inputs = _parts(xs) if is_root else ()
    return _made("scatter", comm, inputs, lambda: (comm.scatter(xs, root),), backward)[0]


@not_compiled
def alltoall(comm: Communicator, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Send ``xs[i]`` to rank i, receive one tensor of each; backward sends the gradients back.

    *Collective.* Shapes and dtypes may differ. Raises as `Communicator.alltoall`; in backward
    CommunicationError: another rank does not run it.

    Example:
        >>> xs = [torch.ones(2)] * comm.size  # one for each rank
        >>> [each.tolist() for each in torchmn.functions.alltoall(comm, xs)]
        [[1.0, 1.0]]
    """

    def backward(grads: list[Tensor]) -> tuple[Gradients, Tensor | None]:
        return alltoall(comm, grads), None

    return _made("alltoall", comm, _parts(xs), lambda: comm.alltoall(xs), backward)


@not_compiled
def allgather(comm: Communicator, x: Tensor) -> tuple[Tensor, ...]:
    """All ranks' tensors on every rank, in rank order; backward sums each one's gradients.

    *Collective.* Shapes and dtypes may differ. Raises as `Communicator.allgather`; in backward
    CommunicationError: another rank does not run it.

    Example:
        >>> [each.tolist() for each in torchmn.functions.allgather(comm, torch.ones(2))]
        [[1.0, 1.0]]
    """

    def backward(grads: list[Tensor]) -> tuple[Gradients, Tensor | None]:
        return (reduce_scatter(comm, grads),), None

    return _made("allgather", comm, (x,), lambda: comm.allgather(x), backward)


@not_compiled
def allreduce(comm: Communicator, x: Tensor, op: Op = "sum") -> Tensor:
    """Sum or mean over ranks; backward is that of the same on one process.

    *Collective.* Shape and dtype are the same on all ranks. For a product, max or min reduce the
    tensors of all ranks: ``torch.stack(allgather(comm, x)).amax(0)``. Raises as
    `Communicator.allreduce`, and UnknownNameError for another ``op``; in backward
    CommunicationError: another rank does not run it.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> torchmn.functions.allreduce(comm, x, "sum").sum().backward()
        >>> x.grad.tolist()
        [1.0, 1.0]
    """
    raise_if_unknown("op", op, get_args(Op))

    def backward(grads: list[Tensor]) -> tuple[Gradients, Tensor | None]:
        return (allreduce(comm, grads[0], op),), None

    return _made("allreduce", comm, (x,), lambda: (comm.allreduce(x, op),), backward)[0]


@not_compiled
def reduce_scatter(comm: Communicator, xs: Sequence[Tensor] | Tensor, op: Op = "sum") -> Tensor:
    """The reduction of ``xs[r]`` over all ranks, at rank r; backward gathers the gradients.

    *Collective.* The r-th tensor has the same shape and dtype on all ranks. ``op`` as in
    `allreduce`. Raises as `Communicator.reduce_scatter`; in backward CommunicationError: another
    rank does not run it.

    Example:
        >>> torchmn.functions.reduce_scatter(comm, [torch.ones(2)] * comm.size, "sum").tolist()
        [1.0, 1.0]
    """
    raise_if_unknown("op", op, get_args(Op))

    def backward(grads: list[Tensor]) -> tuple[Gradients, Tensor | None]:
        own = grads[0] if op == "sum" else grads[0] / comm.size
        return allgather(comm, own), None

    forward = partial(comm.reduce_scatter, xs, op)
    return _made("reduce_scatter", comm, _parts(xs), lambda: (forward(),), backward)[0]


def _made(
    name: str,
    comm: Communicator,
    inputs: Sequence[Any],
    forward: Callable[[], tuple[Tensor, ...]],
    backward: _Backward,
    *,
    is_delegate: bool = False,
) -> tuple[Tensor, ...]:
    """Run a collective, and record it in the graph if any rank requires a gradient."""
    around = checkpoints()
    exchange = Exchange(comm, name, cast(Backward, backward), needs_all_gradients=True)
    exchange.is_delegate = is_delegate
    tensors = [x for x in inputs if isinstance(x, Tensor)]

    def make() -> tuple[tuple[Tensor, ...], Any]:
        # A reentrant checkpoint runs first without gradients, and records in its second run. What
        # the ranks agree on is kept with the results, so that the second run asks no other rank.
        is_recorded = torch.is_grad_enabled() or around.is_reentrant_forward
        if is_recorded:
            own = any(around.records(x) for x in tensors)
            what = f"{name} that may record gradients"
            if current_graph_task_id() != -1:
                what += ", in backward"
            is_recorded = any(allgather_for(comm, what, own))
        with torch.no_grad():
            return forward(), is_recorded

    with exchange.named():
        results, is_recorded = around.once(make)
    if not is_recorded or not torch.is_grad_enabled():
        return results
    return exchange.recorded(results, tensors, is_in_program=around.is_in_program)


def _parts(xs: Any) -> Sequence[Any]:
    """The tensors for the ranks; the communicator rejects what is no sequence of tensors."""
    if isinstance(xs, Tensor):
        return xs.unbind() if xs.dim() else ()
    return xs if isinstance(xs, Sequence) else ()
