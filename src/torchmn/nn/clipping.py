"""The global norm of gradients of which ranks hold parts, clipping by it, and what is not finite.

Parts are DTensors or the parameters of parallel layers. Each rank would find a norm of its own in
its parts, and would clip what all ranks have in common by another factor than the others.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from torchmn.comm import Communicator
from torchmn.comm.local_tensors import division_of, is_distributed


def clip_grad_norm_(
    parameters: Iterable[Tensor] | nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    comm: Communicator | None = None,
) -> Tensor:
    """Scale gradients down to a norm of ``max_norm``, that of the whole; returns the norm before.

    As torch's, but that DTensors of several meshes, parameters of parallel layers and plain ones
    may stand side by side. *Collective over the ranks that hold parts.*

    Args:
        parameters: of this rank's part of the model, or the model.
        max_norm, norm_type: as in torch.
        comm: the ranks of a model of which each has other modules, as with `torchmn.nn.functions`.

    Example:
        >>> layer = torchmn.links.ParallelLinear(3, 2, comm)
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> norm = torchmn.links.clip_grad_norm_(layer, max_norm=1.0)
        >>> round(norm.item(), 4)
        2.8284
    """
    trained = _with_gradients(parameters)
    kinds = _by_owners(trained)
    if comm is None and set(kinds) <= {None}:
        return torch.nn.utils.clip_grad_norm_(trained, max_norm, norm_type)
    total = total_norm(trained, norm_type)
    if comm is not None:
        total = norm_over(comm, total, norm_type)
    for group in kinds.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def total_norm(parameters: Iterable[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients, of the whole. *Collective over the ranks that hold parts.*"""
    norms = []
    for owners, group in _by_owners(_with_gradients(parameters)).items():
        grads = [cast(Tensor, p.grad) for p in group]
        norm = torch.nn.utils.get_total_norm(grads, norm_type)
        if isinstance(owners, Communicator):
            norm = norm_over(owners, norm, norm_type).to(norm)
        norms.append(norm.full_tensor() if is_distributed(norm) else norm)  # type: ignore[attr-defined]
    return (
        torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if norms
        else torch.zeros((), device="cpu")
    )


def norm_over(comm: Communicator, own: Tensor, norm_type: float) -> Tensor:
    """The norm of what all ranks have, from that of each, in float64 on the CPU. *Collective.*"""
    norm = own.double().cpu().view(1)
    if norm_type == float("inf"):
        return comm.allreduce(norm, "max")[0]
    total: Tensor = comm.allreduce(norm**norm_type)[0] ** (1.0 / norm_type)
    return total


def share_nonfinite_(
    parameters: Iterable[Tensor] | nn.Module, comm: Communicator | None = None
) -> None:
    """Make gradients not finite on all ranks where they are so on one. *Collective.*

    Call it between backward and ``scaler.step`` of a plain optimizer for parallel layers, so that
    the GradScalers of all ranks leave the same steps out.

    Args:
        parameters: of the model, or the model.
        comm: the ranks of the model; those of its parallel layers by default.

    Example:
        >>> layer = torchmn.links.ParallelLinear(3, 2, comm)
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> torchmn.links.share_nonfinite_(layer)
    """
    trained = _with_gradients(parameters)
    owners = [comm] if comm is not None else [o for o in _by_owners(trained) if o is not None]
    grads = [cast(Tensor, p.grad) for p in trained]
    is_finite = all(bool(grad.isfinite().all()) for grad in grads)
    flag = torch.tensor([0 if is_finite else 1], dtype=torch.int32, device="cpu")
    for each in owners:
        if isinstance(each, Communicator):
            flag = each.allreduce(flag, "max")
    if int(flag) and is_finite and grads:
        grads[0][(0,) * grads[0].dim()].fill_(float("inf"))


def _with_gradients(parameters: Iterable[Tensor] | nn.Module) -> list[Tensor]:
    found = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    return [parameter for parameter in found if parameter.grad is not None]


def _by_owners(parameters: Iterable[Tensor]) -> dict[object, list[Tensor]]:
    """By the mesh or communicator of the ranks that hold the parts; None: each has the whole."""
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        division = division_of(parameter)
        owners: object = None if division is None else division.comm
        if is_distributed(parameter):
            owners = parameter.device_mesh  # type: ignore[attr-defined]
        groups.setdefault(owners, []).append(parameter)
    return groups
