"""The base class of optimizers that wrap another `torch.optim.Optimizer`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from torchmn.base.errors import UnsupportedError
from torchmn.base.torch_private import STEP_HOOKS


class WrappedOptimizer(Optimizer):
    """An optimizer that shares the groups, state, defaults and other attributes of ``inner``.

    A subclass sets ``inner`` first, and does not call ``__init__`` of `torch.optim.Optimizer`,
    which would create groups and state.
    """

    inner: Optimizer
    _is_complete = False
    """Whether the subclass has set its own attributes: public ones may then be those of inner."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups. Local; never waits."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state. Local; never waits."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet: copying creates objects without __init__
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A script that changes an option which the optimizer has as an attribute, such as
        # ``optimizer.rho *= 0.5``, means that of the inner one.
        is_own = not self._is_complete or name in vars(self) or hasattr(type(self), name)
        if is_own or name.startswith("_") or not hasattr(self.inner, name):
            super().__setattr__(name, value)
        else:
            setattr(self.inner, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "A multi-node optimizer cannot be copied or pickled: it holds connections to the other "
            "ranks. Save its state_dict(), or copy optimizer.inner."
        )


# Calling a function before the step of an optimizer, even of one that wraps another.
#
# torch calls step hooks only in classes whose ``__init__`` called that of `torch.optim.Optimizer`.
# A wrapper such as Lookahead often does not call it, and has only attributes of its own.


def raise_if_it_has_no_hooks(optimizer: Optimizer) -> None:
    """Raise UnsupportedError if torch's step hooks do not exist in an optimizer. Local.

    It may be a wrapper that computes gradients inside its step, after the exchange.
    """
    if hasattr(optimizer, STEP_HOOKS[0]):
        return
    name = type(optimizer).__name__
    raise UnsupportedError(
        f"{name} has not called __init__ of torch.optim.Optimizer. Give "
        "create_multi_node_optimizer the optimizer that it wraps. But where its step() makes the "
        "gradients, as that of Opacus' DPOptimizer, it does so after the exchange and from this "
        "rank's samples only: it cannot be used with torchmn."
    )


def before_step(optimizer: Optimizer, function: Callable[..., None]) -> Callable[[], None]:
    """Call ``function`` before each step of ``optimizer``. Local.

    Its arguments, if any, are those of a step hook of `torch.optim.Optimizer`. Returns a function
    that ends this.
    """
    if getattr(type(optimizer).step, "hooked", False):  # torch's mark of a step that calls hooks
        return optimizer.register_step_pre_hook(function).remove
    own = vars(optimizer)
    before, plain = own.get("step"), optimizer.step

    @functools.wraps(plain)
    def step(*args: Any, **options: Any) -> Any:
        function()
        return plain(*args, **options)

    own["step"] = step

    def remove() -> None:
        if own.get("step") is not step:
            return
        if before is None:
            del own["step"]
        else:
            own["step"] = before

    return remove
