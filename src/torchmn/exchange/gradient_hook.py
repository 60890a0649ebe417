"""A method called when a gradient is final, by a parameter that does not keep its owner alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def watch_gradient(parameter: nn.Parameter, method: Callable[[Tensor], None]) -> RemovableHandle:
    """Call the bound ``method`` whenever the gradient of ``parameter`` is final. Local.

    For a parameter that is frozen this begins once it is not. torch's own hook would keep the
    method's owner, and through it buckets, threads and the parameter itself, alive for ever: the
    garbage collector does not see such a ring, for it runs through C++.
    """
    weak = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        living = weak()
        if living is not None:
            living(parameter)

    is_trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(is_trainable)
    return handle
