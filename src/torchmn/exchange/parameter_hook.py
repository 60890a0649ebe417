"""A method called when a gradient is final, which does not keep its owner alive.

torch's own hook on a parameter would keep the method's owner, and through it buckets, threads and
the parameter itself, alive forever: the garbage collector does not see such a cycle, for it runs
through C++. So parameters refer weakly to the owner, and the model keeps it, which the collector
sees. Copies and pickles of the model carry none of this and load without torchmn.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchmn.base.compiling import not_compiled
from torchmn.base.torch_private import gradient_hooks
from torchmn.exchange.sharded_parameters import whole_of


class GradientHook:
    """What is registered on a parameter. Copies and pickles of parameters carry no such hooks."""

    def __init__(self, method: Callable[[Any], None], argument: object = None) -> None:
        # Not a WeakMethod, which takes five times as long to call.
        self._owner = weakref.ref(method.__self__)  # type: ignore[attr-defined]
        self._function = method.__func__  # type: ignore[attr-defined]
        self._argument = argument

    @property
    def owner(self) -> object | None:
        """The object whose method it calls; None after that was freed."""
        return self._owner()

    @not_compiled
    def __call__(self, parameter: Tensor) -> None:
        """What torch calls."""
        owner = self._owner()
        if owner is not None:
            self._function(owner, parameter if self._argument is None else self._argument)

    def calls(self, method: Callable[[Any], None]) -> bool:
        """Whether this is the hook that calls a bound method."""
        return self._owner() is method.__self__ and self._function is method.__func__  # type: ignore[attr-defined]


def watch_gradient(
    parameter: nn.Parameter, method: Callable[[Any], None], argument: object = None
) -> RemovableHandle:
    """Call the bound ``method`` whenever the gradient of ``parameter`` is final. Local.

    For a parameter that is frozen this begins once it is not. Something must keep the method's
    owner alive, as a model does that has a hook of it, see `ModelHooks`. The method gets
    ``argument``, or if that is None the parameter of the model, also for a `LocalShard`. The
    argument is kept as long as the parameter is, so it must not refer to tensors.
    """
    parameter = cast(nn.Parameter, whole_of(parameter))
    is_trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(
        GradientHook(method, argument)
    )
    parameter.requires_grad_(is_trainable)
    return handle


def owners_of(parameters: Iterable[nn.Parameter]) -> list[object]:
    """The owners of the hooks that `watch_gradient` put on any of the parameters, each once."""
    owners = {}
    for parameter in parameters:
        for hook in _hooks(parameter):
            if isinstance(hook, GradientHook) and hook.owner is not None:
                owners[id(hook.owner)] = hook.owner
    return list(owners.values())


def has_later_hook(parameter: Tensor, method: Callable[[Any], None]) -> bool:
    """Whether the script's own hook is called after ``method``, and may change the gradient."""
    if len(gradient_hooks(parameter) or ()) < 2:
        return False
    for hook in reversed(_hooks(parameter)):
        if not isinstance(hook, GradientHook):
            return True
        if hook.calls(method):
            return False
    return False


def _hooks(parameter: Tensor) -> list[object]:
    return list((gradient_hooks(parameter) or {}).values())
