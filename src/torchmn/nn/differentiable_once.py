"""Gradients that cannot be differentiated again: an error in place of one that is silently wrong.

``once_differentiable`` of torch refuses it only where the gradient that comes in requires one. It
may be a constant, as the ones of a sum, while what backward returns depends on inputs nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from torchmn.errors import UnsupportedError

_Backward = Callable[..., Sequence[Tensor | None]]


def differentiable_once(what: str) -> Callable[[_Backward], _Backward]:
    """Decorate the backward of a function; ``what`` is the error of a second one. Local."""

    def decorate(backward: _Backward) -> _Backward:
        @wraps(backward)
        def once(ctx: Any, *grads: Tensor | None) -> Sequence[Tensor | None]:
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not torch.is_grad_enabled():
                return found
            anchor = torch.empty(0, requires_grad=True, device="cpu")
            return tuple(
                None if each is None else _Refused.apply(what, anchor, each)  # type: ignore[no-untyped-call]
                for each in found
            )

        return once

    return decorate


class _Refused(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, what: str, anchor: Tensor, grad: Tensor) -> Tensor:
        ctx.what = what
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise UnsupportedError(ctx.what)
