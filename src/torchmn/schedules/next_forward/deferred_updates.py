"""The updates of one step, each applied when its mean has arrived and its parameter is needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.compiling import is_compiled_call
from torchmn.errors import UnsupportedError, UsageError
from torchmn.gradients.model_hooks import ModelHooks
from torchmn.profiling import recording
from torchmn.schedules.fingerprint import fingerprint
from torchmn.schedules.next_forward.parameter_access import listen, put_back
from torchmn.schedules.next_forward.partial_step import PartialStep
from torchmn.schedules.next_forward.pending_gradient import GradientUnderWay, MeansUnderWay


@dataclass(frozen=True)
class _Update:
    name: str
    is_present: bool
    """Whether any rank had a gradient."""
    version: int
    """Of the parameter, then."""
    address: int
    fingerprint: Tensor | None = None
    """Of its values, for what is written through ``.data`` changes no version."""


class DeferredUpdates:
    """Updates that `begin` has noted and `apply` has not made yet. Local; waits for sums."""

    def __init__(self) -> None:
        self.rank_label = ""
        """How errors name this rank; set when the schedule is attached."""
        self._pending: dict[nn.Parameter, _Update] = {}
        self._means: MeansUnderWay | None = None
        self._step: PartialStep | None = None
        self._hooks = ModelHooks()
        self._modules: list[nn.Module] = []

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._pending

    def name_of(self, parameter: nn.Parameter) -> str:
        """Of one that is pending."""
        return self._pending[parameter].name

    def begin(
        self, inner: Optimizer, means: MeansUnderWay, is_present: Mapping[nn.Parameter, bool]
    ) -> None:
        """Note what one step does, with the current options, and do what can be done at once.

        The footer has arrived; ``is_present`` says which parameters have a mean.
        """
        self._means, self._step = means, PartialStep(inner)
        self._pending = {
            parameter: _Update(
                slot.name, is_present[parameter], parameter._version, parameter.data_ptr()
            )
            for parameter, slot in means.means.slot_of.items()
            if parameter in self._step and parameter.requires_grad
        }
        not_exchanged = [
            parameter
            for group in inner.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and parameter not in self._pending
        ]
        if not_exchanged:
            if any(type(parameter.grad) is GradientUnderWay for parameter in not_exchanged):
                means.resolve()  # of one that was frozen since
            self._step.update(not_exchanged)
        self.apply([parameter for parameter in self._pending if self._has_arrived(parameter)])
        self._pending = {
            parameter: replace(update, fingerprint=fingerprint(parameter))
            for parameter, update in self._pending.items()
        }

    def _has_arrived(self, parameter: nn.Parameter) -> bool:
        return self._means is not None and self._means.means.has_arrived(parameter)

    def apply_one(self, parameter: nn.Parameter) -> None:
        """Make that of one parameter, if it is pending."""
        if parameter in self._pending:
            self.apply([parameter])

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
        due.update(dict.fromkeys(p for p in self._pending if self._has_arrived(p)))
        means = {parameter: self._means.take(parameter) for parameter in due}
        self._raise_if_changed(due)
        kept: list[tuple[nn.Parameter, Tensor | None]] = []
        for parameter in due:
            kept.append((parameter, parameter.grad))
            parameter.grad = means[parameter] if self._pending.pop(parameter).is_present else None
        before = recording.enter("optimizer")
        try:
            self._step.update(due)
        finally:
            recording.leave(before)
            for parameter, grad in kept:
                parameter.grad = grad

    def _raise_if_changed(self, parameters: Collection[nn.Parameter]) -> None:
        changed = [
            parameter
            for parameter in parameters
            if (parameter._version, parameter.data_ptr())
            != (self._pending[parameter].version, self._pending[parameter].address)
        ]
        known = [p for p in parameters if self._pending[p].fingerprint is not None]
        if known and not changed:
            # One question to a GPU, not one for each parameter.
            then = torch.stack([cast(Tensor, self._pending[p].fingerprint).cpu() for p in known])
            now = torch.stack([fingerprint(parameter).cpu() for parameter in known])
            changed = [p for p, same in zip(known, (then == now).tolist(), strict=True) if not same]
        if changed:
            raise UsageError(
                f"{self.rank_label}: '{self.name_of(changed[0])}' was changed between step() and "
                "its update, which comes just before its layer runs again, by code that holds the "
                "parameter itself. Get it from the model there (model.parameters()), or call "
                "optimizer.flush() before you change parameters."
            )

    # ---- just before a layer runs ----

    def install_hooks(
        self,
        models: Sequence[nn.Module],
        sites: Mapping[nn.Module, Collection[nn.Parameter]],
        before_all: Collection[nn.Parameter],
        before_graph: Callable[[], None],
    ) -> None:
        """Apply updates before the modules of ``sites`` run, some of them before any module does.

        Code that gets parameters from a module, copies it, saves or loads its state finds them
        complete. ``before_graph`` is called before anything that a backward pass may follow.
        """

        def apply_due(module: nn.Module, args: object, kwargs: object) -> None:
            if torch.compiler.is_compiling():
                return  # done before the code was called, or `raise_if_used` raises
            if torch.is_grad_enabled():
                before_graph()
            if not self._pending:
                return
            if module.training and torch.is_grad_enabled() and not is_compiled_call():
                self.apply([*before_all, *sites.get(module, ())])
            else:  # evaluation and compiled code may read parameters without calling their modules
                self.apply_all()

        for module in dict.fromkeys(m for model in models for m in model.modules()):
            if module in sites or module in models:
                self._hooks.before_forward(module, apply_due, prepend=True)
            self._hooks.before_copy(module, self.apply_all)
            listen(module, self, self.apply_one, self.apply_all)
            self._modules.append(module)

    def unhook(self) -> None:
        """Take the hooks off."""
        self._hooks.remove()
        for module in self._modules:
            put_back(module, self)
        self._modules.clear()

    def raise_if_used(self, parameter: Tensor) -> None:
        """Raise UnsupportedError if a gradient came of a value that the last step should change."""
        update = self._pending.get(parameter)  # type: ignore[call-overload]
        if update is not None:
            raise UnsupportedError(
                f"{self.rank_label}: '{update.name}' was used before the update of the last step "
                "was applied to it: its values were read by a module that did not read them in the "
                "first steps, or without the hooks of modules. Name it in "
                f"EveryStepNextForward(eager_parameters=[{update.name!r}]), or call "
                "optimizer.flush() before such a forward pass."
            )


def update_sites(
    models: Sequence[nn.Module],
    names: Mapping[nn.Parameter, str],
    readers: Mapping[nn.Parameter, Collection[nn.Module]],
    eager_parameters: Collection[str],
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
        is_named = any(f"{name}.".startswith(f"{listed}.") for listed in eager_parameters)
        own = owners.get(parameter, set())
        if len(own) != 1 or is_named:
            before_all.append(parameter)
            continue
        for module in own.union(readers.get(parameter, ())):
            sites.setdefault(module, []).append(parameter)
    return sites, before_all
