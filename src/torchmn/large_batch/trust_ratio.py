"""What LARS and LAMB share: which parameters are adapted, norms, and their ratio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.local_tensors import is_distributed
from torchmn.errors import UnsupportedError


def gradients_of(group: dict[str, Any]) -> Iterator[tuple[bool, list[Tensor], list[Tensor]]]:
    """The parameters of a group that have gradients, and these: adapted ones, then those left out.

    Raises UnsupportedError: a gradient is sparse, or a parameter is sharded or not real.
    """
    for is_left_out in (False, True):
        params = [
            parameter
            for parameter in group["params"]
            if parameter.grad is not None
            and (group["exclude_vectors"] and parameter.dim() <= 1) == is_left_out
        ]
        if not params:
            continue
        for parameter in params:
            _raise_if_unsupported(parameter)
        yield is_left_out, params, [parameter.grad for parameter in params]


def is_foreach(group: dict[str, Any], params: Sequence[Tensor]) -> bool:
    """Whether one call updates all tensors. On a CPU tensor after tensor stays in the cache."""
    if group["foreach"] is not None:
        return bool(group["foreach"])
    return all(parameter.is_cuda for parameter in params)


def norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm; float16 cannot hold that of a large layer."""
    found: Tensor = torch.linalg.vector_norm(tensor, dtype=_dtype_of_norm(tensor))
    return found


def norms(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norms by one call, shape ``(tensors,)``, on the device of the tensors."""
    return torch.stack(list(torch._foreach_norm(tensors, 2, _dtype_of_norm(tensors[0]))))


def _dtype_of_norm(tensor: Tensor) -> torch.dtype | None:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None


def ratios(numerator: Tensor, denominator: Tensor, factor: float = 1.0) -> list[Any]:
    """Their quotients times ``factor``, 1 where either is 0: what tensors are multiplied by.

    Numbers on a CPU; on a GPU tensors, without waiting for it.
    """
    is_defined = (numerator > 0) & (denominator > 0)
    quotient = torch.where(is_defined, factor * numerator / denominator, 1.0)
    return list(quotient.unbind()) if quotient.is_cuda else quotient.tolist()


class Scratch:
    """Two buffers in turn of the shape of each parameter: new memory for each would be slow."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._buffers: list[Tensor] = []
        first = params[0]
        if all(p.dtype == first.dtype and p.device == first.device for p in params):
            most = max(p.numel() for p in params)
            self._buffers = [first.new_empty(most) for _ in range(2)]

    def like(self, parameter: Tensor) -> list[Tensor]:
        """Both buffers, in the order of the parameter's values in memory."""
        if not self._buffers or not parameter.is_contiguous():
            return [torch.empty_like(parameter) for _ in range(2)]
        return [each[: parameter.numel()].view_as(parameter) for each in self._buffers]


def _raise_if_unsupported(parameter: Tensor) -> None:
    if is_distributed(parameter):
        raise UnsupportedError(
            "LARS and LAMB adapt the rate to the norm of whole layers, and this parameter, shape "
            f"{list(parameter.shape)}, is sharded (a DTensor). Train it unsharded, or use another "
            "optimizer."
        )
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise UnsupportedError(
            f"The gradient of a parameter of shape {list(parameter.shape)} is sparse. LARS and "
            "LAMB need dense ones: make the Embedding with sparse=False."
        )
    if parameter.is_complex():
        raise UnsupportedError(
            f"A parameter of shape {list(parameter.shape)} is complex; LARS and LAMB are for real "
            "ones."
        )
