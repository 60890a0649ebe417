"""How many Python calls a step costs: what a parameter adds, and what a backward pass costs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "scripts"))
from count_calls import calls_of_a_later_hook, count_calls

CALLS_OF_A_HOOK = 3
"""The hook, the reducer, the packing."""
MAX_BACKWARD, MAX_STEP, MAX_ZERO_GRAD = 195, 17, 2
"""Of 8 layers. Wanted are 160, 15 and 2."""


def test_a_gradient_costs_three_calls_and_a_pass_not_many_more() -> None:
    few, many = count_calls(8), count_calls(16)
    assert calls_of_a_later_hook(few["backward"]) == CALLS_OF_A_HOOK
    assert len(many["backward"]) - len(few["backward"]) == 16 * CALLS_OF_A_HOOK
    assert len(many["step"]) == len(few["step"])
    assert len(few["backward"]) <= MAX_BACKWARD
    assert len(few["step"]) <= MAX_STEP
    assert len(few["zero_grad"]) <= MAX_ZERO_GRAD
