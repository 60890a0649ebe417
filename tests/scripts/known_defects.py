"""What is known to be wrong: these tests are expected to fail, and fail if they pass."""

from __future__ import annotations

_CASES: dict[str, tuple[str, ...]] = {
    "torch refuses to swap a parameter to which a weak reference exists": (
        "parameters_swapped-every_step_next_forward-2",
    ),
    "a list of `p.detach()` made once is old before `optimizer.flush()`": (
        "average_by_foreach-every_step_next_forward-2",
    ),
}

KNOWN_DEFECTS = {
    (name, schedule, int(size)): reason
    for reason, cases in _CASES.items()
    for name, schedule, size in (case.split("-") for case in cases)
}
"""By script, schedule and number of ranks, why."""
