"""A step with a rank's own gradient, until the mean of all ranks is there.

The expectation of a rank's own gradient is that of the mean, so that a step with it is right but
for noise. A schedule that waits for the mean takes it to compute the next gradient at about the
parameters that the mean will give, undoes it, and then steps with the mean: what ranks hold in the
long run depends on means only, and is the same on all of them. Nothing of it is left in the
optimizer (see `trial_step`), whose state is that of the steps with means at any time.

The own gradient is made no longer than the last mean. It is noisier than the mean, and the mean
may have been clipped.

Source: the eager updates of Kale et al., *Eager Updates For Overlapped Communication and
Computation in DiLoCo*, 2025, which do the same with blocks and keep the own part of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.errors import UsageError
from torchmn.schedules.trial_step import trial_step

Named = Sequence[tuple[str, nn.Parameter]]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element in bytes."""
_MAX_NAMED = 3


class EagerStep:
    """Takes and undoes steps with own gradients. All methods are local.

    ``trained`` returns the parameters that are exchanged, by name.
    """

    def __init__(self, inner: Optimizer, trained: Callable[[], Named], rank_label: str) -> None:
        self._inner, self._trained, self._rank_label = inner, trained, rank_label
        self._before: list[tuple[str, nn.Parameter, Tensor]] = []
        """The parameters and their values before the step; empty if there is none."""
        self._sums: list[int] = []
        """Of the bits of the parameters after it."""

    @property
    def is_taken(self) -> bool:
        """Whether the parameters are those of a step that will be undone."""
        return bool(self._before)

    def step(self, own: Mapping[Tensor, Tensor], scale: float = 1.0) -> None:
        """Step with the means in ``p.grad``, then with own gradients, which `undo` takes back.

        The latter are multiplied by ``scale``, or by less: their norm becomes no larger than that
        of the means. Without any, or not only finite ones, nothing is done with them. ``p.grad``
        stays as it is.
        """
        if not own:
            self._inner.step()
            return
        norms: list[float] = []  # of what the optimizer sees, after all hooks that clip it
        hook = self._inner.register_step_pre_hook(
            lambda *_: norms.append(_norm([p.grad for p in self._parameters()]))
        )
        try:
            self._inner.step()
        finally:
            hook.remove()
        self._take(own, scale, norms[-1] if norms else 0.0)

    def undo(self) -> None:
        """Return to the parameters before the step, if there was one.

        Raises UsageError: the script has changed the parameters since. They are returned as well.
        """
        before, self._before = self._before, []
        changed = self._changed(before)
        _load(before)
        if changed:
            raise UsageError(
                f"{self._rank_label}: parameters were changed after step(): "
                f"{', '.join(map(repr, changed[:_MAX_NAMED]))}. They were those of a step with the "
                "rank's own gradient, which is undone when the mean is there, and the change with "
                "it. Change parameters in a hook (optimizer.register_step_post_hook) or between "
                "backward() and step(), call optimizer.flush() before it, or use "
                "DoubleBuffering(eager=False)."
            )

    def release(self) -> None:
        """As `undo`, but parameters that the script has changed since keep their values."""
        before, self._before = self._before, []
        changed = set(self._changed(before))
        _load([each for each in before if each[0] not in changed])

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """What `undo` returns to, and this rank's parameters now."""
        after = {name: p.detach().clone() for name, p in self._trained()}
        return {"before": after | {n: value.clone() for n, _, value in self._before}, "after": after}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`: the parameters become those of the step."""
        self.release()
        if not state:
            return
        named = self._trained()
        _load([(name, p, state["after"][name]) for name, p in named])
        self._before = [(n, p, state["before"][n].to(p, copy=True)) for n, p in named]
        self._sums = _sums_of_bits([p for _, p in named])

    # ---- implementation ----

    def _take(self, own: Mapping[Tensor, Tensor], scale: float, mean_norm: float) -> None:
        parameters = self._parameters()
        own_norm = _norm([own.get(p) for p in parameters])
        if not (own_norm > 0 and math.isfinite(own_norm) and mean_norm > 0):
            return
        factor = min(scale, mean_norm / own_norm)
        means = [p.grad for p in parameters]
        before = [(name, p, p.detach().clone()) for name, p in self._trained()]
        try:
            with trial_step(self._inner):
                for p in parameters:
                    p.grad = own[p] * factor if p in own else None
                self._inner.step()
        except BaseException:
            _load(before)
            raise
        finally:
            for p, mean in zip(parameters, means, strict=True):
                p.grad = mean
        self._before, self._sums = before, _sums_of_bits([p for _, p, _ in before])

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._inner.param_groups for p in group["params"]]

    def _changed(self, before: Sequence[tuple[str, nn.Parameter, Tensor]]) -> list[str]:
        sums = _sums_of_bits([p for _, p, _ in before])
        rows = zip(before, self._sums, sums, strict=False)
        return [name for (name, _, _), then, now in rows if then != now]


@torch.no_grad()
def _load(values: Sequence[tuple[str, nn.Parameter, Tensor]]) -> None:
    for _, parameter, value in values:
        parameter.copy_(value)


@torch.no_grad()
def _sums_of_bits(parameters: Sequence[Tensor]) -> list[int]:
    """A number for each: any change of one element changes it. Devices are waited for once."""
    sums: list[Tensor] = []
    for p in parameters:
        real = torch.view_as_real(p) if p.is_complex() else p
        sums.append(real.detach().view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64))
    if len({each.device for each in sums}) > 1:
        sums = [each.cpu() for each in sums]
    return torch.stack(sums).tolist() if sums else []


def _norm(gradients: Sequence[Tensor | None]) -> float:
    dense = [
        gradient.coalesce().values() if gradient.is_sparse else gradient
        for gradient in gradients
        if gradient is not None
    ]
    return float(torch.nn.utils.get_total_norm(dense)) if dense else 0.0
