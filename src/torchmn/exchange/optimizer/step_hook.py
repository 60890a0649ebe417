"""A function that is called before the step of an optimizer, also of one that wraps another.

Torch calls hooks in the ``step`` of classes whose ``__init__`` called that of
`torch.optim.Optimizer`. A wrapper such as Lookahead often has only the attributes that it makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from torchmn.errors import UnsupportedError

_TABLE = "_optimizer_step_pre_hooks"
"""Torch's private name, of an attribute that `torch.optim.Optimizer.__init__` makes."""


def raise_if_it_has_no_hooks(optimizer: Optimizer) -> None:
    """Raise UnsupportedError: an optimizer by name only, which may make gradients in its step."""
    if hasattr(optimizer, _TABLE):
        return
    name = type(optimizer).__name__
    raise UnsupportedError(
        f"{name} has not called __init__ of torch.optim.Optimizer. Give "
        "create_multi_node_optimizer the optimizer that it wraps. But where its step() makes the "
        "gradients, as that of Opacus' DPOptimizer, it does so after the exchange and from this "
        "rank's samples only: it cannot be used with torchmn."
    )


def before_step(optimizer: Optimizer, function: Callable[[], None]) -> Callable[[], None]:
    """Call ``function()`` before each step, until what is returned is called. Local."""
    if getattr(type(optimizer).step, "hooked", False):
        return optimizer.register_step_pre_hook(lambda *_: function()).remove
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
