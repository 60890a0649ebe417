"""Detection of parameters that a script has changed where the schedule could not follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchmn.exchange.buckets import NamedParameter, elements_of

_NUM_SAMPLED = 4096  # at least this many elements of a parameter are compared, if it has as many
# Rounding errors that are tolerated where a change was undone, as after a sharpness-aware step.
_NUM_ROUNDINGS = 16


class ParameterSample:
    """A sample of the values of each parameter. Local."""

    def __init__(self, parameters: Sequence[NamedParameter]) -> None:
        self._parameters = parameters
        self._samples: list[Tensor] = []

    def note(self) -> None:
        """Take the sample of the current values, with which later ones are compared."""
        self._samples = [_sample(parameter).clone() for _, parameter in self._parameters]

    @property
    def is_noted(self) -> bool:
        """Whether there is a sample: `note` was called since `forget`, and there are parameters."""
        return bool(self._samples)

    def changed(self) -> list[str]:
        """The names of parameters that differ from the sample; none if there is no sample."""
        rows = zip(self._parameters, self._samples, strict=bool(self._samples))
        return [name for (name, now), then in rows if _is_other(_sample(now), then)]

    def forget(self) -> None:
        """Drop the sample: nothing counts as changed until the next call of `note`."""
        self._samples = []


def _sample(parameter: Tensor) -> Tensor:
    """Some elements of a parameter, evenly spaced. Local."""
    return elements_of(parameter)[:: max(1, parameter.numel() // _NUM_SAMPLED)]


def _is_other(now: Tensor, then: Tensor) -> bool:
    """Whether two samples differ by more than the rounding of a change that was undone."""
    has_fractions = now.dtype.is_floating_point or now.dtype.is_complex
    is_converted = now.dtype != then.dtype or now.device != then.device  # as by model.float()
    if is_converted or not has_fractions or not now.numel():
        return False
    allowed = _NUM_ROUNDINGS * torch.finfo(now.dtype).eps * then.abs().max()
    return bool((now - then).abs().max() > allowed)
