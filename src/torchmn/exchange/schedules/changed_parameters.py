"""Finds parameters that a script has changed where the schedule could not follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchmn.exchange.buckets import NamedParameter, elements_of

_NUM_SAMPLED = 4096  # the least number of elements that are compared of a parameter, if it has them
# By how many of them a change that was taken back, as by a sharpness-aware step, may be off.
_NUM_ROUNDINGS = 16


class ParameterSample:
    """A sample of the values of each parameter. Local."""

    def __init__(self, parameters: Sequence[NamedParameter]) -> None:
        self._parameters = parameters
        self._samples: list[Tensor] = []

    def note(self) -> None:
        """The values of now are known."""
        self._samples = [_sample(parameter).clone() for _, parameter in self._parameters]

    @property
    def is_noted(self) -> bool:
        """Whether there were parameters at the last call of `note`, if it was not forgotten."""
        return bool(self._samples)

    def changed(self) -> list[str]:
        """The names of those that are others than at the last call of `note`."""
        rows = zip(self._parameters, self._samples, strict=bool(self._samples))
        return [name for (name, now), then in rows if _is_other(_sample(now), then)]

    def forget(self) -> None:
        """Nothing counts as changed until the next call of `note`."""
        self._samples = []


def _sample(parameter: Tensor) -> Tensor:
    """Some elements of a parameter, at equal distances. Local."""
    return elements_of(parameter)[:: max(1, parameter.numel() // _NUM_SAMPLED)]


def _is_other(now: Tensor, then: Tensor) -> bool:
    """Whether they differ by more than the rounding of a change that was taken back."""
    has_fractions = now.dtype.is_floating_point or now.dtype.is_complex
    is_converted = now.dtype != then.dtype or now.device != then.device  # as by model.float()
    if is_converted or not has_fractions or not now.numel():
        return False
    allowed = _NUM_ROUNDINGS * torch.finfo(now.dtype).eps * then.abs().max()
    return bool((now - then).abs().max() > allowed)
