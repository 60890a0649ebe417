"""The updates of one step, each applied when its mean has arrived and its parameter is needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.errors import UnsupportedError, UsageError
from torchmn.exchange.bucket_set import BucketSet
from torchmn.exchange.model_hooks import ModelHooks
from torchmn.exchange.next_forward.partial_step import PartialStep


class SeenGradient:
    """What was in a ``p.grad``, without keeping it alive."""

    def __init__(self, grad: Tensor | None) -> None:
        self._reference = None if grad is None else weakref.ref(grad)
        self._version = _version(grad)

    def is_same(self, grad: Tensor | None) -> bool:
        """Whether it is the same tensor, maybe with other values."""
        return grad is not None and self._reference is not None and self._reference() is grad

    def is_unchanged(self, grad: Tensor | None) -> bool:
        """Whether it is the same tensor with the same values."""
        return _version(grad) == self._version and (grad is None or self.is_same(grad))


@dataclass(frozen=True)
class _Update:
    name: str
    slot: Tensor
    is_present: bool
    """Whether any rank had a gradient."""
    local: SeenGradient
    """What was in ``p.grad`` at the time of the step."""
    version: int
    """Of the parameter, then."""


class DeferredUpdates:
    """Updates that `begin` has noted and `apply` has not made yet. Local; waits for sums."""

    def __init__(self, speaker: str) -> None:
        self._speaker = speaker
        self._pending: dict[nn.Parameter, _Update] = {}
        self._means: BucketSet | None = None
        self._step: PartialStep | None = None
        self._hooks = ModelHooks()

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._pending

    def name_of(self, parameter: nn.Parameter) -> str:
        """Of one that is pending."""
        return self._pending[parameter].name

    def begin(
        self,
        inner: Optimizer,
        means: BucketSet,
        is_present: Mapping[nn.Parameter, bool],
        local: Mapping[nn.Parameter, SeenGradient],
    ) -> None:
        """Note what one step does, with the options of now, and do what can be done at once.

        The footer has arrived; ``is_present`` says which parameters have a mean, ``local`` what
        their ``p.grad`` is.
        """
        self._means, self._step = means, PartialStep(inner)
        self._pending = {
            parameter: _Update(
                name, slot, is_present[parameter], local[parameter], parameter._version
            )
            for bucket in means.buckets
            for name, parameter, slot in zip(
                bucket.names, bucket.parameters, bucket.slots, strict=True
            )
            if parameter in self._step and parameter.requires_grad
        }
        not_exchanged = [
            parameter
            for group in inner.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and parameter not in self._pending
        ]
        if not_exchanged:
            self._step.update(not_exchanged)
        self.apply([parameter for parameter in self._pending if means.has_arrived(parameter)])

    def apply_all(self) -> None:
        """Make all that are left."""
        self.apply(list(self._pending))

    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make those of them that are pending. Raises UsageError: a parameter was changed since."""
        due = dict.fromkeys(p for p in parameters if p in self._pending)
        if not due or self._means is None or self._step is None:
            return
        # A step of the optimizer costs as much for one parameter as for ten small ones: take along
        # what has arrived meanwhile.
        due.update(dict.fromkeys(p for p in self._pending if self._means.has_arrived(p)))
        for parameter in due:
            self._means.take(parameter, self._pending[parameter].slot)
            if parameter._version != self._pending[parameter].version:
                raise UsageError(
                    f"{self._speaker}: '{self.name_of(parameter)}' was changed between step() and "
                    "its update, which comes just before its layer runs again. Call "
                    "optimizer.flush() before you change parameters."
                )
        kept: list[tuple[nn.Parameter, Tensor | None]] = []
        for parameter in due:
            update, grad = self._pending.pop(parameter), parameter.grad
            mean = update.slot if update.is_present else None
            # Cleared or replaced since: leave it so. Else it is the mean, as behind a usual step.
            is_mean = grad is not None and update.local.is_unchanged(grad)
            kept.append((parameter, mean if is_mean else grad))
            parameter.grad = mean
        try:
            self._step.update(due)
        finally:
            for parameter, grad in kept:
                parameter.grad = grad

    # ---- just before a layer runs ----

    def hook_into(
        self,
        models: Sequence[nn.Module],
        sites: Mapping[nn.Module, Collection[nn.Parameter]],
        before_all: Collection[nn.Parameter],
        before_graph: Callable[[], None],
    ) -> None:
        """Apply updates before the modules of ``sites`` run, some of them before any module does.

        Whoever saves or loads a module's state finds it complete. ``before_graph`` is called before
        anything that a backward pass may follow.
        """

        def before_forward(module: nn.Module, args: object, kwargs: object) -> None:
            if torch.is_grad_enabled():
                before_graph()
            if not self._pending:
                return
            if module.training and torch.is_grad_enabled():
                self.apply([*before_all, *sites.get(module, ())])
            else:  # in evaluation modules may read others' parameters without calling them
                self.apply_all()

        for module in dict.fromkeys(m for model in models for m in model.modules()):
            if module in sites or module in models:
                self._hooks.before_forward(module, before_forward, prepend=True)
            self._hooks.before_state(module, self.apply_all)
            self._hooks.before_copy(module, self.apply_all)

    def unhook(self) -> None:
        """Take the hooks off."""
        self._hooks.remove()

    def raise_if_used(self, parameter: Tensor) -> None:
        """Raise UnsupportedError if a gradient came of a value that the last step should change."""
        update = self._pending.get(parameter)  # type: ignore[call-overload]
        if update is not None:
            raise UnsupportedError(
                f"{self._speaker}: '{update.name}' was used before the update of the last step was "
                "applied to it: its values were read by a module that did not read them in the "
                "first steps, or without the hooks of modules. Name it in "
                f"EveryStepNextForward(before_forward=[{update.name!r}]), or call "
                "optimizer.flush() before such a forward pass."
            )


def update_sites(
    models: Sequence[nn.Module],
    names: Mapping[nn.Parameter, str],
    readers: Mapping[nn.Parameter, Collection[nn.Module]],
    before_forward: Collection[str],
) -> tuple[dict[nn.Module, list[nn.Parameter]], list[nn.Parameter]]:
    """Before which modules each parameter must be up to date, and which before all.

    Before the module that owns it, and those that were seen to read it first in a pass. Before all
    if several modules own it, if none does, or if it or a module around it is named.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in (m for model in models for m in model.modules()):
        for owned in module._parameters.values():
            if owned is not None:
                owners.setdefault(owned, set()).add(module)
    sites: dict[nn.Module, list[nn.Parameter]] = {}
    before_all = []
    for parameter, name in names.items():
        is_named = any(f"{name}.".startswith(f"{listed}.") for listed in before_forward)
        own = owners.get(parameter, set())
        if len(own) != 1 or is_named:
            before_all.append(parameter)
            continue
        for module in own.union(readers.get(parameter, ())):
            sites.setdefault(module, []).append(parameter)
    return sites, before_all


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version
