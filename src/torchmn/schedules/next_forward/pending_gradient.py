"""What ``p.grad`` is while its mean is under way: a tensor that waits for it when it is used.

Between ``backward()`` and the mean's arrival there is nothing to see. Whatever a script does with
such a gradient (a norm, clipping, ``+``, ``.data``, `torch.save`, NumPy) is done with the mean, for
which it waits. A gradient that is not used costs neither memory nor time.

Only Python can be made to wait. Code in C++ that adds to ``p.grad`` is autograd's:
`await_before_add` lets it find the mean.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchmn.errors import UsageError
from torchmn.gradients.bucket_set import BucketSet
from torchmn.gradients.reducer import GradientReducer

_FACTS: set[Any] = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "is_sparse", "is_cuda")
    ),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_complex, Tensor.is_floating_point),
}
"""What is known of a mean before it arrives."""


class GradientUnderWay(Tensor):
    """Made by `MeansUnderWay`; holds NaN in the memory of one number, which is never seen.

    Its attribute ``under_way`` refers to the `MeansUnderWay`, ``mean`` is the mean once that has
    arrived. The reference is weak: the garbage collector does not see what ``p.grad`` refers to,
    and would keep the model, its optimizer and their memory forever.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do it with the means."""
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*_arrived(args), **_arrived(kwargs or {}))


class MeansUnderWay:
    """The means of one exchange, which become gradients one by one. Local; waits for sums.

    ``parameters`` are those whose ``p.grad`` is to be a mean. ``before_use`` is called once, before
    the script uses one of them.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        means: BucketSet,
        parameters: Collection[nn.Parameter],
        before_use: Callable[[], None],
    ) -> None:
        self.means = means
        self._reducer = reducer
        self._before_use = before_use
        self._taken: set[nn.Parameter] = set()
        self._gradients: dict[nn.Parameter, weakref.ref[GradientUnderWay]] = {}
        for parameter in means.slot_of:
            if parameter in parameters:
                gradient = self._new(parameter)
                self._gradients[parameter] = weakref.ref(gradient)
                parameter.grad = gradient
            else:
                parameter.grad = None

    def _new(self, parameter: nn.Parameter) -> GradientUnderWay:
        nothing = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
        gradient = nothing.expand(parameter.shape).as_subclass(GradientUnderWay)
        vars(gradient)["under_way"] = weakref.ref(self)
        return gradient

    def use(self) -> None:
        """Let all gradients be their means: the script uses one of them."""
        self._before_use()
        self.resolve()

    @property
    def is_untouched(self) -> bool:
        """Whether no ``p.grad`` was used, replaced or cleared since."""
        for parameter in self.means.slot_of:
            reference = self._gradients.get(parameter)
            gradient = reference() if reference is not None else None
            if parameter.grad is not gradient or (reference is not None and gradient is None):
                return False
        return True

    def take(self, parameter: nn.Parameter) -> Tensor:
        """The mean of one parameter in its slot; after `BucketSet.await_footer`."""
        slot = self.means.slot_of[parameter]
        if parameter not in self._taken:
            self.means.take(slot)
            self._taken.add(parameter)
        return slot.tensor

    def resolve(self) -> None:
        """Wait for all, and let every gradient that is still held be its mean."""
        self.means.await_footer()
        self._reducer.buffers.adopt_scale(self.means)
        for parameter in self.means.slot_of:
            mean, reference = self.take(parameter), self._gradients.pop(parameter, None)
            gradient = reference() if reference is not None else None
            if gradient is None:
                continue
            if parameter.grad is gradient:
                self._assign(parameter, mean)
                vars(gradient)["mean"] = parameter.grad
            else:
                vars(gradient)["mean"] = mean.clone()

    def resolve_held(self) -> None:
        """`resolve`, if anything holds one of the gradients: their memory is about to be reused."""
        if any(reference() is not None for reference in self._gradients.values()):
            self.resolve()

    def _assign(self, parameter: nn.Parameter, mean: Tensor) -> None:
        if self._reducer.gradient_as_bucket_view:
            parameter.grad = mean
        elif mean.dtype is not parameter.dtype or mean.device != parameter.device:
            parameter.grad = mean.to(parameter)  # as in the middle of model.half()
        else:
            self._reducer.means.memory.set_all([parameter], [mean])


def await_before_add(parameter: nn.Parameter) -> RemovableHandle:
    """Let autograd find the mean when it adds to ``parameter.grad``."""

    def hook(new: Tensor) -> None:
        gradient = owner().grad  # type: ignore[union-attr]
        if type(gradient) is GradientUnderWay:
            _arrived(gradient)

    owner = weakref.ref(parameter)
    handle: RemovableHandle = parameter.register_hook(hook)
    return handle


def _mean_of(gradient: GradientUnderWay) -> Tensor:
    attributes = vars(gradient)
    if "mean" not in attributes:
        under_way: MeansUnderWay | None = attributes["under_way"]()
        if under_way is None:
            raise UsageError(
                "A gradient was used after its multi-node optimizer was deleted, before the mean "
                "over ranks had arrived. Use gradients, or call optimizer.close(), before that."
            )
        under_way.use()
    mean: Tensor = attributes["mean"]
    return mean


def _arrived(value: Any) -> Any:
    """The value with means in place of the gradients in it."""
    if type(value) is GradientUnderWay:
        return _mean_of(value)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_arrived(part) for part in value)
    if type(value) is dict:
        return {key: _arrived(part) for key, part in value.items()}
    return value
