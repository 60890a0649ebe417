"""Eager steps: a step with a rank's own gradient, applied until the mean of all ranks arrives.

A rank's own gradient has the same expectation as the mean, so a step with it is right except for
noise. A schedule that waits for the mean adds the change of such a step to the parameters for one
forward and backward pass, so that the next gradient is computed close to where the mean will lead.
Before and after these passes the parameters are those of steps with means, the same on all ranks:
these are what scripts read, average, save, evaluate and change. The optimizer itself is left
unchanged (see `trial_step`).

The own gradient is scaled down to the norm of the last mean if it is longer: it is noisier than the
mean, and the mean may have been clipped.

Source: the eager updates of Kale et al., *Eager Updates For Overlapped Communication and
Computation in DiLoCo*, 2025, which do the same with blocks and keep the own part of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.compiling import not_compiled
from torchmn.base.errors import PerformanceWarning, UsageError
from torchmn.base.torch_private import functorch_level, is_tracing
from torchmn.base.warn import warn
from torchmn.exchange.model_hooks import ModelHooks
from torchmn.exchange.replica_divergence import bits_of
from torchmn.exchange.replicas import parameters_of
from torchmn.exchange.schedules.trial_step import trial_step

Named = Sequence[tuple[str, nn.Parameter]]
_MAX_NAMED = 3
_NOT_COMPILED = (
    "DoubleBuffering(eager=True) changes parameters before the model runs. Leave fullgraph=True "
    "out, or compile the model before create_multi_node_optimizer"
)


class LateMeans:
    """Steps with late means only. All methods are local."""

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner

    def pass_ended(self) -> None:
        """Called when a backward pass has ended, whose mean will be applied a step late."""

    def step(self, own: Mapping[Tensor, Tensor], scale: float) -> None:
        """Apply the means in ``p.grad``.

        ``own`` and ``scale`` are used by `EagerStep`: this rank's gradients of the following pass,
        and their size relative to a mean.
        """
        self._inner.step()

    def remove(self) -> None:
        """Restore the parameters that all ranks hold, before they are read."""

    def forget(self) -> None:
        """Discard a step with this rank's own gradients of the last pass."""

    def close(self) -> None:
        """Stop watching."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that belongs to the pending mean."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; an empty dict starts from scratch."""


class EagerStep(LateMeans):
    """Makes steps with own gradients, and adds them when one of ``models`` is called to train it.

    ``trained`` returns the exchanged parameters with their names.
    """

    def __init__(
        self,
        inner: Optimizer,
        trained: Callable[[], Named],
        rank_label: str,
        models: Sequence[nn.Module],
    ) -> None:
        super().__init__(inner)
        self._trained, self._rank_label, self._models = trained, rank_label, list(models)
        self._hooks = ModelHooks()
        self._changes: dict[str, Tensor] = {}
        """The change that the next passes apply, by the parameter's name."""
        self._before: list[tuple[str, nn.Parameter, Tensor]] = []
        """The parameters with their values without the change, while it is applied."""
        self._fingerprints: list[Tensor] = []
        """Fingerprints of the parameters with the change applied."""
        self._mean_norm = 0.0
        """The norm of the last means, as the optimizer has seen them."""
        self._num_missed = 0
        """Number of passes for which the change was not applied."""
        for model in models:
            self._hooks.before_forward(model, self._forward_begins, prepend=True)

    @partial(not_compiled, reason=_NOT_COMPILED)  # a break before a model, not within
    def _forward_begins(self, *_: object) -> None:
        if not self._changes or self._before or not torch.is_grad_enabled():
            return
        # functorch refuses changes in place; what is traced would become a part of the graph.
        if functorch_level() is not None or is_tracing():
            return
        if self._num_missed or any(m.training for model in self._models for m in model.modules()):
            self._add()

    def _layer_begins(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._forward_begins()

    def step(self, own: Mapping[Tensor, Tensor], scale: float) -> None:
        """Step with the means in ``p.grad``; note the change that own gradients would make.

        Own gradients are multiplied by ``scale``, or by less, so that their norm does not exceed
        that of the means. If there are none, or some are not finite, nothing is noted. ``p.grad``
        is left as it is.
        """
        self._mean_norm = 0.0
        hook = self._inner.register_step_pre_hook(self._measure)  # after all hooks that clip
        try:
            self._inner.step()
        finally:
            hook.remove()
        self._try(own, scale)

    @not_compiled
    def _measure(self, *_: object) -> None:
        self._mean_norm = _norm([p.grad for p in parameters_of(self._inner)])

    def pass_ended(self) -> None:
        """Undo and discard the step at the end of a pass. Raises UsageError: see `remove`."""
        if self._changes and not self._before:
            self._num_missed += 1
            if self._num_missed == 1:  # the script may train it in eval(), or call its layers
                for module in {m for model in self._models for m in model.modules()}:
                    self._hooks.before_forward(module, self._layer_begins, prepend=True)
            elif self._num_missed == 2:
                self._warn()
        self.forget()

    def remove(self) -> None:
        """Undo the step; the next forward pass applies it again.

        Raises UsageError: the script changed parameters meanwhile; its change is undone as well.
        """
        before, self._before = self._before, []
        changed = self._changed(before)
        _load(before)
        if changed:
            names = ", ".join(map(repr, changed[:_MAX_NAMED]))
            raise UsageError(
                f"{self._rank_label}: parameters were changed between forward and backward: "
                f"{names}. They were those of a step with the rank's own gradient, which is taken "
                "back at the end of backward, and the change with it. Change parameters between "
                "backward() and the next forward pass, compute what is not trained on under "
                "torch.no_grad(), or use DoubleBuffering(eager=False)."
            )

    def forget(self) -> None:
        """Undo and discard the step. Raises UsageError: see `remove`."""
        self._changes = {}
        self.remove()

    def close(self) -> None:
        """Undo and discard the step, and stop watching; changes made by the script stay."""
        self._hooks.remove()
        before, self._before, self._changes = self._before, [], {}
        changed = set(self._changed(before))
        _load([each for each in before if each[0] not in changed])

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """The change that the next passes apply, by name. It is undone first."""
        self.remove()
        return {"ahead": {name: change.clone() for name, change in self._changes.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LateMeans.load_state_dict`."""
        self.forget()
        changes = state.get("ahead", {})
        named = self._trained() if changes else []
        self._changes = {name: changes[name].to(p, copy=True) for name, p in named}

    # ---- implementation ----

    def _try(self, own: Mapping[Tensor, Tensor], scale: float) -> None:
        self._changes = {}
        parameters = parameters_of(self._inner)
        own_norm = _norm([own.get(p) for p in parameters])
        if not (own_norm > 0 and math.isfinite(own_norm) and self._mean_norm > 0):
            return
        factor = min(scale, self._mean_norm / own_norm)
        means = [p.grad for p in parameters]
        before = [(name, p, p.detach().clone()) for name, p in self._trained()]
        try:
            with trial_step(self._inner):
                for p in parameters:
                    p.grad = own[p] * factor if p in own else None
                self._inner.step()
            self._changes = {name: p.detach() - value for name, p, value in before}
        finally:
            _load(before)
            for p, mean in zip(parameters, means, strict=True):
                p.grad = mean

    @not_compiled
    @torch.no_grad()
    def _add(self) -> None:
        self._before = [(name, p, p.detach().clone()) for name, p in self._trained()]
        for name, p, _ in self._before:
            change = self._changes.get(name)
            if change is not None and change.shape == p.shape:
                p.add_(change.to(p))
        self._fingerprints = [_fingerprint(p) for _, p, _ in self._before]

    def _changed(self, before: Sequence[tuple[str, nn.Parameter, Tensor]]) -> list[str]:
        now = [_fingerprint(p) for _, p, _ in before]
        flags = _differ(self._fingerprints[: len(now)], now)
        return [name for (name, _, _), flag in zip(before, flags, strict=True) if flag]

    def _warn(self) -> None:
        warn(
            f"{self._rank_label}: DoubleBuffering(eager=True) has no effect on some passes: they "
            "did not begin with a call of the model, or a module of it. Call modules, with "
            "gradients enabled, before parameters are used, and not inside of torch.func or of a "
            "function that is compiled together with backward().",
            PerformanceWarning,
        )


@torch.no_grad()
def _load(values: Sequence[tuple[str, nn.Parameter, Tensor]]) -> None:
    if values:
        torch._foreach_copy_([p for _, p, _ in values], [value for _, _, value in values])


def _norm(gradients: Sequence[Tensor | None]) -> float:
    dense = [
        gradient.coalesce().values() if gradient.is_sparse else gradient
        for gradient in gradients
        if gradient is not None
    ]
    return float(torch.nn.utils.get_total_norm(dense)) if dense else 0.0


def _fingerprint(parameter: Tensor) -> Tensor:
    """The sum of a parameter's bit patterns, which differs if any single element changes. Local."""
    return bits_of(parameter).sum(dtype=torch.int64)


def _differ(then: Sequence[Tensor], now: Sequence[Tensor]) -> list[bool]:
    """Whether each fingerprint has changed. The host waits for the device only once. Local."""
    if len({each.device for each in (*then, *now)}) > 1:
        then, now = [each.cpu() for each in then], [each.cpu() for each in now]
    found: list[bool] = (torch.stack(list(then)) != torch.stack(list(now))).tolist() if then else []
    return found
