"""The costs of an exchange that no timer sees directly, from measured steps.

What a transfer takes from the core that computes shows in the step only. Each cost is found such
that the model's steps are those that were measured, as many costs as there are different steps:
sending first, then packing, then what is lost to interrupts. What no measured step depends on stays
0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from torchmn.planning.description import Costs, Description, Setting
from torchmn.planning.prediction import inputs_of

_LIMITS = {"send_s_per_byte": 20e-9, "pack_s_per_byte": 10e-9, "interference": 0.6}
_NUM_ROUNDS = 8
_NUM_CUTS = 20
_NEGLIGIBLE = 1e-6
_SECTION = (math.sqrt(5) - 1) / 2


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The measured step of a setting. ``compute_s``: without exchange at that time, if known."""

    setting: Setting
    step_s: float
    compute_s: float | None = None


def calibrated(known: Description, observations: Sequence[Observation]) -> Description:
    """The description with the costs that explain these steps best."""
    exchanging = [each for each in observations if each.setting.num_ranks > 1]
    if not exchanging:
        return known
    names = list(_LIMITS)[: len(exchanging)]
    costs = Costs()

    def misfit(candidate: Costs) -> float:
        return _misfit(msgspec.structs.replace(known, costs=candidate), exchanging)

    for _ in range(_NUM_ROUNDS if len(names) > 1 else 1):
        for name in names:
            costs = _best(costs, name, misfit)
    return msgspec.structs.replace(known, costs=costs)


def _misfit(known: Description, observations: Sequence[Observation]) -> float:
    return sum(
        math.log(inputs_of(known_then(known, each), each.setting).seconds() / each.step_s) ** 2
        for each in observations
    )


def known_then(known: Description, observation: Observation) -> Description:
    """The description at the time of an observation, when cores were faster or slower."""
    if observation.compute_s is None:
        return known
    then_s = known.compute_of(observation.setting.samples).compute_s
    return at_speed(known, observation.compute_s / then_s)


def at_speed(known: Description, factor: float) -> Description:
    """The description where all that cores do takes ``factor`` times as long."""
    replace = msgspec.structs.replace
    costs = known.costs
    return replace(
        known,
        batches=[replace(each, compute_s=factor * each.compute_s) for each in known.batches],
        codecs={
            name: replace(each, encode_s=factor * each.encode_s, decode_s=factor * each.decode_s)
            for name, each in known.codecs.items()
        },
        costs=None
        if costs is None
        else replace(
            costs,
            pack_s_per_byte=factor * costs.pack_s_per_byte,
            send_s_per_byte=factor * costs.send_s_per_byte,
        ),
    )


def _best(costs: Costs, name: str, misfit: Callable[[Costs], float]) -> Costs:
    """The costs with the best value of one of them, by golden sections; 0 if it changes nothing."""

    def at(value: float) -> Costs:
        return msgspec.structs.replace(costs, **{name: value})

    low, high = 0.0, _LIMITS[name]
    for _ in range(_NUM_CUTS):
        left, right = high - _SECTION * (high - low), low + _SECTION * (high - low)
        if misfit(at(left)) <= misfit(at(right)):
            high = right
        else:
            low = left
    found = at((low + high) / 2)
    return found if misfit(found) < misfit(at(0.0)) - _NEGLIGIBLE else at(0.0)
