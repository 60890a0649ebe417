"""The inner optimizers' states after blocks, where ranks continue with the same steps.

Parameters are equal after a flush, but each rank's momenta are those of its own gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchmn.comm import Communicator
from torchmn.comm.local_tensors import local_part
from torchmn.errors import RankMismatchError
from torchmn.exchange.model_tensors import parameters_of
from torchmn.exchange.replicas import broadcast_optimizer_state


@torch.no_grad()
def average_inner_state(comm: Communicator, inner: Optimizer, *, is_active: bool) -> None:
    """Make the optimizer's state the same on all ranks: the mean of its tensors. *Collective.*

    Counts of steps become rank 0's. Where only some ranks have a state for a parameter, rank 0's
    is taken. ``is_active``: whether this rank is still in its loop.

    Raises RankMismatchError on all ranks: those in their loops have different learning rates.
    """
    _raise_if_rates_differ(comm, inner, is_active=is_active)
    tensors: dict[str, Tensor] = {}
    for index, parameter in enumerate(parameters_of(inner)):
        for name, value in inner.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim() and not value.is_sparse:
                tensors[f"{index}.{name}"] = local_part(value)
    means = {n: t for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    described = [(name, list(tensor.shape)) for name, tensor in means.items()]
    if all(theirs == described for theirs in comm.allgather_obj(described)):
        for tensor in means.values():
            tensor.copy_(comm.allreduce(tensor, "mean"))
    broadcast_optimizer_state(comm, inner)


def _raise_if_rates_differ(comm: Communicator, inner: Optimizer, *, is_active: bool) -> None:
    rates = [float(group["lr"]) for group in inner.param_groups if "lr" in group]
    gathered = comm.allgather_obj(rates if is_active else None)
    present = {rank: theirs for rank, theirs in enumerate(gathered) if theirs is not None}
    if len(set(map(tuple, present.values()))) > 1:
        raise RankMismatchError(
            f"{comm.rank_label}: from here on all ranks take the same steps, and their learning "
            f"rates differ: {present}. Ranks have made different numbers of steps; let the rate "
            "depend on the samples over all workers (optimizer.schedule.num_samples)."
        )
