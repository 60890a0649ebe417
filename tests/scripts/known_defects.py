"""What is known to be wrong: these tests are expected to fail, and fail if they pass."""

from __future__ import annotations

_CASES: dict[str, tuple[str, ...]] = {
    "other memory takes a parameter or a gradient out of the exchange": (
        "parameters_swapped-every_step_next_forward-2",
    ),
    "gradients of parameters that the optimizer does not have are not exchanged": (
        "clip_more_than_is_trained-auto-2",
        "clip_more_than_is_trained-every_step-2",
        "clip_more_than_is_trained-every_step_next_forward-2",
    ),
    "the mean over ranks has no graph, which torch says in its own words": (
        "curvature-auto-2",
        "curvature-every_step-2",
        "curvature-every_step_next_forward-2",
    ),
    "Dynamo warns of a hook of torchmn": (
        "compiled_before_wrapping-every_step_next_forward-2",
        "compiled_in_place-every_step_next_forward-2",
    ),
    "a parameter that the script holds is read before its deferred update": (
        "average_by_foreach-every_step_next_forward-2",
    ),
}

KNOWN_DEFECTS = {
    (name, schedule, int(size)): reason
    for reason, cases in _CASES.items()
    for name, schedule, size in (case.split("-") for case in cases)
}
"""By script, schedule and number of ranks, why."""
