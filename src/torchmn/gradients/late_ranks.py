"""Ranks that have no backward pass in a step, and so exchange in `step` only.

A rank whose part of a batch is empty may leave ``backward()`` out. What its script does between
``backward()`` and ``step()``, such as clipping, then meets no gradients there, and the means on the
other ranks. After such an exchange the late ranks take over the gradients of one that was not late,
as they are when it steps.
"""

from __future__ import annotations

from torchmn.gradients.reducer import GradientReducer


def share_with_late_ranks(reducer: GradientReducer) -> None:
    """Give late ranks the gradients of another rank, if there are both. *Collective* then.

    To be called after the exchange of a step, before the optimizer uses its means. Without effect
    where ranks hold shards of parameters, which no other rank has.
    """
    if not reducer.means.are_late_on_some or reducer.parameters.are_sharded:
        return
    comm = reducer.comm
    is_late = reducer.is_late or not reducer.is_active
    source = comm.allgather_obj(is_late).index(False)
    parameters = [parameter for _, parameter in reducer.parameters.trained()]
    own = None
    if comm.rank == source:
        own = [None if p.grad is None else p.grad.detach().cpu() for p in parameters]
    gradients = comm.bcast_obj(own, source)
    if is_late and reducer.is_active:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
