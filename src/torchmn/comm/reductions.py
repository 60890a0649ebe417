"""Reductions that users call: operation and scaling, and checks of tensors before sending."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from torchmn.base.errors import UsageError, raise_if_unknown
from torchmn.comm.transports.base import COMBINE, ReduceOp

UserOp = Literal["sum", "mean", "product", "max", "min"]

OPS = ("sum", "mean", "product", "max", "min")


@dataclass(frozen=True)
class Reduction:
    """The elementwise reduction ``postscale_factor * op(prescale_factor * x)`` over ranks.

    A mean divides by the number of ranks before the sum. Raises UnknownNameError: unknown ``op``;
    UsageError: a factor that is not a finite number.
    """

    op: str
    prescale_factor: float
    postscale_factor: float

    def __post_init__(self) -> None:
        raise_if_unknown("reduction", self.op, OPS)
        for name in ("prescale_factor", "postscale_factor"):
            factor = getattr(self, name)
            if not isinstance(factor, (int, float)) or not math.isfinite(factor):
                raise UsageError(f"{name}={factor!r} must be a finite number.")

    @property
    def transport_op(self) -> ReduceOp:
        """The operation that the transport performs; a mean is a sum."""
        return "sum" if self.op == "mean" else cast(ReduceOp, self.op)

    def raise_if_unfit(self, x: Tensor) -> None:
        """Raise UsageError if the dtype of ``x`` does not support this reduction."""
        is_exact = x.dtype.is_floating_point or x.dtype.is_complex
        if self.op == "mean" and not is_exact:
            raise UsageError(f"A mean of {x.dtype} is not supported. Use op='sum' or .float().")
        if not is_exact and (self.prescale_factor, self.postscale_factor) != (1, 1):
            raise UsageError(f"{x.dtype} cannot be multiplied by a factor. Use .float().")
        try:
            # An empty tensor shows whether torch supports the operation for this dtype.
            nothing = torch.empty(0, dtype=x.dtype, device="cpu")
            COMBINE[self.transport_op](nothing, nothing)
        except (RuntimeError, TypeError) as error:  # which of them depends on the version of torch
            raise UsageError(f"op={self.op!r} of {x.dtype} does not exist: {error}") from error

    def prepare_(self, x: Tensor, size: int) -> Tensor:
        """Scale this rank's tensor in place, before the reduction over ``size`` ranks."""
        if self.prescale_factor != 1:
            x.mul_(self.prescale_factor)
        return x.div_(size) if self.op == "mean" and size > 1 else x

    def finish_(self, x: Tensor) -> Tensor:
        """Scale the result of the reduction in place."""
        return x.mul_(self.postscale_factor) if self.postscale_factor != 1 else x


def dense(what: str, x: object) -> Tensor:
    """Return the tensor, detached. Raises UsageError: it is not a dense tensor with values."""
    if not isinstance(x, Tensor):
        raise UsageError(
            f"{what} needs a tensor, got {_kind(x)}. For objects use the _obj methods."
        )
    if x.is_nested:
        raise UsageError(
            f"{what} needs a dense tensor, got a nested one. Pass its parts, x.unbind(), or "
            "x.to_padded_tensor(0.0)."
        )
    if x.layout != torch.strided:
        raise UsageError(
            f"{what} needs a dense tensor, got one of layout {x.layout}. Use x.to_dense()."
        )
    if x.is_quantized or x.is_meta:
        kind = "quantized one: use x.dequantize()" if x.is_quantized else "meta one, without values"
        raise UsageError(f"{what} needs a dense tensor, got a {kind}.")
    return x.detach()


def dense_parts(what: str, xs: object, size: int) -> list[Tensor]:
    """One dense tensor per rank, from a sequence or along the first dim of a tensor.

    Raises UsageError: there are not ``size`` parts, or a part is not a dense tensor.
    """
    if isinstance(xs, Tensor):
        whole = dense(what, xs)
        xs = list(whole) if whole.dim() else []
    elif not isinstance(xs, Sequence):
        raise UsageError(f"{what} needs {size} parts, got {_kind(xs)}.")
    if len(xs) != size:
        raise UsageError(f"{what} needs {size} parts, got {len(xs)}.")
    return [dense(what, x) for x in xs]


def described(x: Tensor) -> str:
    """Dtype and shape as text, such as ``float32[3, 4]``, with the device type unless it is CPU."""
    where = "" if x.device.type == "cpu" else f" on {x.device.type}"
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{where}"


def _kind(x: object) -> str:
    return "None" if x is None else f"a {type(x).__name__}"


def without_backward(name: str, result: Any) -> Any:
    """Make backward through the result of a collective raise UsageError.

    For collectives of tensors that require a gradient. The result requires a gradient as well, so
    that a backward pass reaches it if it is part of the loss. Silently leaving out this part of the
    gradient would train something else.
    """
    if isinstance(result, tuple):
        return tuple(without_backward(name, each) for each in result)
    if not isinstance(result, Tensor) or not (result.is_floating_point() or result.is_complex()):
        return result
    # In a list autograd does not see the result as an input of the function; the anchor makes the
    # output require a gradient.
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    return _NoBackward.apply(name, [result], anchor)  # type: ignore[no-untyped-call]


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, results: list[Tensor], anchor: Tensor) -> Tensor:
        ctx.name = name
        return results[0]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        cure = "allreduce" if ctx.name == "sum_over_ranks" else ctx.name
        raise UsageError(
            f"comm.{ctx.name} was given a tensor that requires a gradient, and backward() has "
            "reached its result: this collective has no gradient, and that of the loss would lack "
            f"a part. Use torchmn.functions.{cure}(comm, ...), whose gradient is summed over "
            "ranks, or detach() what is meant as a constant."
        )
