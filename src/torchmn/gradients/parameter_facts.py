"""What the place of a parameter in a bucket depends on, and whether it has changed.

`nn.Module.to`, `half`, `requires_grad_` and an assignment to ``.data`` change parameters in place,
at any time, and tell nobody.
"""

from __future__ import annotations

from torch import nn


class ParameterFacts:
    """What the place of a parameter in a bucket depends on."""

    __slots__ = ("_address", "_facts", "_is_trainable", "_parameter")

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._is_trainable = parameter.requires_grad
        self._address = parameter.data_ptr()
        self._facts = parameter.dtype, parameter.device, parameter.shape

    def have_changed(self) -> bool:
        """Whether it needs another place. What has the address of before is not looked at."""
        parameter = self._parameter
        if parameter.requires_grad is not self._is_trainable:
            return True
        if parameter.data_ptr() == self._address:
            return False
        if (parameter.dtype, parameter.device, parameter.shape) != self._facts:
            return True
        self._address = parameter.data_ptr()
        return False
