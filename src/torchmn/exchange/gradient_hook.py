"""A method called when a gradient is final, whose owner lives as long as the model, no longer.

torch's own hook on a parameter would keep the method's owner, and through it buckets, threads and
the parameter itself, alive for ever: the garbage collector does not see such a ring, for it runs
through C++. So parameters call weakly, and the model keeps the owner, which the collector sees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def watch_gradient(parameter: nn.Parameter, method: Callable[[Tensor], None]) -> RemovableHandle:
    """Call the bound ``method`` whenever the gradient of ``parameter`` is final. Local.

    For a parameter that is frozen this begins once it is not. The method's owner must be kept by
    somebody, see `keep_with`.
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


def keep_with(model: nn.Module, owner: object) -> None:
    """Let ``owner`` live as long as the model. Gradients are exchanged even if nobody else has it.

    Local. Copies of the model, and what is pickled of it, do not keep it.
    """
    model.__dict__.setdefault(_KEPT, _Kept()).owners.append(owner)


def release(model: nn.Module, owner: object) -> None:
    """End what `keep_with` began. Local; nothing happens the second time."""
    kept: _Kept = model.__dict__.get(_KEPT, _Kept())
    kept.owners = [other for other in kept.owners if other is not owner]


_KEPT = "_torchmn_kept"


class _Kept:
    def __init__(self) -> None:
        self.owners: list[object] = []

    def __deepcopy__(self, memo: object) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return (_Kept, ())
