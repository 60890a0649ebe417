"""Norms, clipping and finiteness of gradients of which ranks hold parts.

Parts are DTensors or the parameters of parallel layers. By itself each rank would find the norm of
its parts only, and would scale the parameters that all ranks share by a factor of its own.
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
    """Clip the gradients of the whole model to ``max_norm``; return the norm before clipping.

    Like torch's function, but DTensors of several meshes, parameters of parallel layers and plain
    parameters may be mixed. *Collective over the ranks that hold parts.*

    Args:
        parameters: the parameters of this rank's part of the model, or the model.
        max_norm, norm_type: as in torch.
        comm: the ranks of a model, if they have different modules, as with `torchmn.nn.functions`.

    Example:
        >>> layer = torchmn.nn.ParallelLinear(3, 2, comm)
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> norm = torchmn.nn.clip_grad_norm_(layer, max_norm=1.0)
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
    """The norm of all gradients of the whole. *Collective over the ranks that hold parts.*"""
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
    """Combine the norms of all ranks' parts, in float64 on the CPU. *Collective.*"""
    norm = own.double().cpu().view(1)
    if norm_type == float("inf"):
        return comm.allreduce(norm, "max")[0]
    total: Tensor = comm.allreduce(norm**norm_type)[0] ** (1.0 / norm_type)
    return total


def share_nonfinite_(
    parameters: Iterable[Tensor] | nn.Module, comm: Communicator | None = None
) -> None:
    """Make gradients non-finite on all ranks if they are on one. *Collective.*

    Call it between backward and ``scaler.step`` of a plain optimizer for parallel layers, so that
    the GradScalers of all ranks skip the same steps.

    Args:
        parameters: the parameters of the model, or the model.
        comm: the ranks of the model; those of its parallel layers by default.

    Example:
        >>> layer = torchmn.nn.ParallelLinear(3, 2, comm)
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> torchmn.nn.share_nonfinite_(layer)
    """
    trained = _with_gradients(parameters)
    owners = [comm] if comm is not None else [o for o in _by_owners(trained) if o is not None]
    grads = [cast(Tensor, p.grad) for p in trained]
    is_finite = all(bool(grad.isfinite().all()) for grad in grads)
    flag = torch.tensor([0 if is_finite else 1], dtype=torch.int32, device="cpu")
    for each in owners:
        if isinstance(each, Communicator):
            flag = each.allreduce(flag, "max")
    if int(flag) and is_finite and grads:  # one value is enough for a GradScaler to skip the step
        grads[0][(0,) * grads[0].dim()].fill_(float("inf"))


def _with_gradients(parameters: Iterable[Tensor] | nn.Module) -> list[Tensor]:
    found = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    return [parameter for parameter in found if parameter.grad is not None]


def _by_owners(parameters: Iterable[Tensor]) -> dict[object, list[Tensor]]:
    """Group parameters by the mesh or communicator of the ranks that hold their parts.

    None is the key of parameters that each rank has whole.
    """
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        division = division_of(parameter)
        owners: object = None if division is None else division.comm
        if is_distributed(parameter):
            owners = parameter.device_mesh  # type: ignore[attr-defined]
        groups.setdefault(owners, []).append(parameter)
    return groups
