"""What a rank has pulled from the servers, to find what its script has changed since."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchmn.exchange.buckets import NamedParameter, is_dense

_NUM_SAMPLED = 4096
"""The least number of elements that are compared of a parameter, if it has them."""
_NUM_ROUNDINGS = 16
"""By how many of them a change that was taken back, as by a sharpness-aware step, may be off."""


class PulledParameters:
    """A sample of the values of each parameter. Local."""

    def __init__(self, parameters: Sequence[NamedParameter]) -> None:
        self._parameters = parameters
        self._samples: list[Tensor] = []

    def note(self) -> None:
        """The servers know of the values of now."""
        self._samples = [_sample(parameter).clone() for _, parameter in self._parameters]

    def changed(self) -> list[str]:
        """The names of those that are others than at the last call of `note`."""
        rows = zip(self._parameters, self._samples, strict=True)
        return [name for (name, now), then in rows if _is_other(_sample(now), then)]


def _sample(parameter: Tensor) -> Tensor:
    """Some elements of a parameter, at equal distances. Local."""
    values = parameter.detach()
    if not is_dense(values):
        values = values.contiguous()
    numel = values.numel()
    return values.as_strided((numel,), (1,))[:: max(1, numel // _NUM_SAMPLED)]


def _is_other(now: Tensor, then: Tensor) -> bool:
    """Whether they differ by more than the rounding of a change that was taken back."""
    has_fractions = now.dtype.is_floating_point or now.dtype.is_complex
    is_converted = now.dtype != then.dtype or now.device != then.device  # as by model.float()
    if is_converted or not has_fractions or not now.numel():
        return False
    allowed = _NUM_ROUNDINGS * torch.finfo(now.dtype).eps * then.abs().max()
    return bool((now - then).abs().max() > allowed)
