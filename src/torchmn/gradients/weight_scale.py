"""The unit in which the weights of an exchange are counted."""

from __future__ import annotations

import math


def weight_scale(total: float, num_active: int) -> float:
    """The power of two at or above the mean weight.

    In this unit a 16-bit sum of weighted gradients stays in range. Powers of two shift exponents
    only, so the bits of a mean do not depend on the unit.
    """
    if total <= 0 or num_active == 0:
        return 1.0
    fraction, exponent = math.frexp(total / num_active)
    return math.ldexp(1.0, exponent - 1 if fraction == 0.5 else exponent)
