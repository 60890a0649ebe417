"""How many Python calls a step costs: what a parameter adds, and what a backward pass costs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "scripts"))
from count_calls import count_calls, num_hooks

NUM_HOOKS = 2
"""Of a model whose parameters are in one bucket: the first gradient, and the one that came last."""
MAX_BACKWARD, MAX_STEP, MAX_ZERO_GRAD = 160, 15, 2
"""Of any number of layers."""


def test_a_gradient_costs_no_call_and_a_pass_not_many() -> None:
    few, many = count_calls(8), count_calls(16)
    assert num_hooks(few["backward"]) == num_hooks(many["backward"]) == NUM_HOOKS
    assert len(many["backward"]) == len(few["backward"])
    assert len(many["step"]) == len(few["step"])
    assert len(few["backward"]) <= MAX_BACKWARD
    assert len(few["step"]) <= MAX_STEP
    assert len(few["zero_grad"]) <= MAX_ZERO_GRAD
