"""What was measured, as a description for the model, and beside its answers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from exchange.table import BATCH

from plan.settings import CASES, Case
from torchmn.planning.calibration import Observation, at_speed, calibrated
from torchmn.planning.description import Description
from torchmn.planning.prediction import predict_setting


def described(
    facts: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]], num_cores: int
) -> Description:
    """The description that the facts of all workers and the fitted cases give."""
    typical_s = statistics.median(s for fact in facts for s in fact["steps_s"])
    first = facts[0]
    known = msgspec.convert(
        {
            "title": "VGG-16 for CIFAR on test hosts",
            "batches": [{"samples": BATCH, "compute_s": typical_s}],
            "backward_share": statistics.mean(fact["backward_s"] for fact in facts) / typical_s,
            "after_share": statistics.mean(fact["after_s"] for fact in facts) / typical_s,
            "gradients": first["gradients"],
            "codecs": {
                name: {
                    key: statistics.mean(fact["codecs"][name][key] for fact in facts)
                    for key in ("bits", "encode_s", "decode_s")
                }
                for name in first["codecs"]
            },
            "link": {"rate": "10gbit", **first["link"]},
            "deviations": [
                s / statistics.median(fact["steps_s"]) - 1
                for fact in facts
                for s in fact["steps_s"]
            ],
        },
        Description,
    )
    observations = []
    for case in CASES:
        of_case = [turn for turn in turns if turn["case"] == case.name]
        if case.is_fitted and of_case:
            observations.append(
                Observation(
                    setting=case.setting(num_cores),
                    step_s=statistics.median(turn["seconds"] for turn in of_case),
                    compute_s=statistics.median(turn["alone_s"] for turn in of_case),
                )
            )
    return calibrated(known, observations)


def ratios(
    case: Case, known: Description, turns: Sequence[Mapping[str, Any]], num_cores: int
) -> list[float]:
    """Measured steps of a case over predicted ones, which begin from the step alone just before."""
    found = []
    for turn in turns:
        if turn["case"] == case.name:
            then = at_speed(known, turn["alone_s"] / known.batches[0].compute_s)
            predicted = predict_setting(then, case.setting(num_cores))
            found.append(turn["seconds"] / predicted.seconds)
    return found
