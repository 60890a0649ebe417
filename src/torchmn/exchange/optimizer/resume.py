"""The state of a multi-node optimizer: saved, loaded, and resharded for another number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchmn.base.errors import UsageError
from torchmn.comm import Communicator
from torchmn.exchange.auto.tuner import Autotuner
from torchmn.exchange.bucket_set import Reduction
from torchmn.exchange.codec_state import codec_state
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.replicas import load_inner_state
from torchmn.exchange.resharding import (
    mean_state,
    raise_if_other_optimizer,
    reshard_codec,
    reshard_inner,
    reshard_object,
    warnings_of,
)
from torchmn.exchange.schedules.base import Schedule

State = dict[str, Any]
_NOT_THE_SCHEDULES = ("schedule", "optimizer", "codec", "progress", "accumulated", "tuner")
"""The keys under ``torchmn`` that do not belong to the schedule's state."""


def save(inner: Optimizer, schedule: Schedule, reducer: GradientReducer) -> State:
    """See `MultiNodeOptimizer.state_dict`."""
    ours = schedule.state_dict()  # first: it waits for what is under way
    state = inner.state_dict()
    state["torchmn"] = {
        "schedule": schedule.name,
        "optimizer": type(inner).__name__,
        "codec": codec_state(reducer.codec, reducer.comm),
        "progress": reducer.progress(),
        **({"accumulated": _accumulated(reducer)} if reducer.local_passes.may_exist else {}),
        **ours,
    }
    return state


def load(state: State, inner: Optimizer, schedule: Schedule, reducer: GradientReducer) -> None:
    """See `MultiNodeOptimizer.load_state_dict`."""
    ours = state.get("torchmn", {})
    raise_if_other_optimizer(inner, state, ours.get("optimizer", ""))
    schedule.before_access("read")
    if isinstance(schedule, Autotuner):
        schedule.load_plan(ours.get("tuner", {}))
    own = _schedule_state(ours, schedule)
    load_inner_state(inner, {k: v for k, v in state.items() if k != "torchmn"})
    # The saved state includes untrained parameters in its buckets. A fresh optimizer would find
    # them only at its first exchange.
    has_untrained = ours.get("progress", {}).get("has_untrained")
    if has_untrained and reducer.parameters.have_changed():
        reducer.rebuild()
    schedule.load_state_dict(own)
    reducer.load_state_dict(ours.get("codec", {}), ours.get("progress", {}))
    _load_accumulated(reducer, ours.get("accumulated"))


def _schedule_state(ours: State, schedule: Schedule) -> State:
    """The schedule's own part of a saved state. Raises UsageError: it is another schedule's."""
    saved = ours.get("schedule", schedule.name)
    own = {key: value for key, value in ours.items() if key not in _NOT_THE_SCHEDULES}
    if own and saved != schedule.name:
        raise UsageError(
            f"This state was saved with schedule {saved!r} and holds something that "
            f"{schedule.name!r} would lose. Call flush() before saving, or use {saved!r}."
        )
    return own if saved == schedule.name else {}


def reshard(
    states: Sequence[State], comm: Communicator, schedule: Schedule, reduction: Reduction
) -> State:
    """See `MultiNodeOptimizer.reshard_state_dict`."""
    ours = [state.get("torchmn", {}) for state in states]
    state = reshard_inner(states)
    if not all(ours):
        return state
    schedules = [{k: v for k, v in own.items() if k not in _NOT_THE_SCHEDULES} for own in ours]
    plans = [own["tuner"] for own in ours if "tuner" in own]
    is_tuned = isinstance(schedule, Autotuner) and len(plans) == len(ours)
    if isinstance(schedule, Autotuner):
        space, schedule = schedule.space, schedule.current
        if is_tuned and (make := space.schedules.get(ours[0]["schedule"])) is not None:
            schedule = make()
    is_same = ours[0]["schedule"] == schedule.name
    state["torchmn"] = {
        "schedule": ours[0]["schedule"],
        "optimizer": ours[0].get("optimizer", ""),
        "codec": reshard_codec([own["codec"] for own in ours], comm),
        # The scale of weights suits the old number of ranks; the new ones agree on theirs.
        "progress": {**ours[0]["progress"], "scale": None} if "progress" in ours[0] else {},
        **(reshard_object(schedule, schedules, comm) if is_same else schedules[0]),
        # The old plan for one step, then all is measured again.
        **({"tuner": {**plans[0], "is_selected": False}} if is_tuned else {}),
    }
    accumulated = [own["accumulated"] for own in ours if "accumulated" in own]
    if accumulated:
        state["torchmn"]["accumulated"] = _shared_out(accumulated, comm.size, reduction)
    return state


def other_size_warnings(
    schedule: Schedule, *, codec: object, models: Sequence[nn.Module]
) -> list[str]:
    """See `MultiNodeOptimizer.resume_warnings`."""
    warnings = warnings_of(schedule)
    if codec is not None:
        warnings.append(
            f"The residuals of {codec} are kept, but gradients are rounded in other parts: the run "
            "takes another path, as with another seed."
        )
    if any(True for model in models for _ in model.buffers()):
        warnings.append(
            "Buffers that differ between ranks, such as running statistics of batch normalization, "
            "become those of rank 0, as when the optimizer is made."
        )
    return warnings


def _accumulated(reducer: GradientReducer) -> State:
    """The accumulated gradients of passes under no_sync() by name, and their weight."""
    own = reducer.contribution
    return {
        "gradients": {
            name: parameter.grad.detach().clone()
            for name, parameter in reducer.parameters.trained()
            if parameter.grad is not None
        },
        "weight": own.weight,
        "num_samples": own.num_samples,
        "is_set": own.is_set,
    }


def _load_accumulated(reducer: GradientReducer, state: State | None) -> None:
    """Continue from accumulated gradients of no_sync(); None resets only their weight."""
    own = reducer.contribution
    own.reset()
    reducer.local_passes.may_exist = state is not None
    if state is None:
        return
    for name, parameter in reducer.parameters.trained():
        gradient = state["gradients"].get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter).clone()
    own.resume(state["num_samples"])
    if state["is_set"] or own.weight != state["weight"]:
        own.set(state["weight"], state["num_samples"])


def _shared_out(accumulated: Sequence[State], num_new: int, reduction: Reduction) -> State:
    """Distribute the accumulated gradients of unfinished steps among new ranks.

    Each new rank gets their mean and an equal part of the weights, or, if gradients are summed, an
    equal part of the sum.
    """
    weights = [state["weight"] for state in accumulated]
    gradients = mean_state([state["gradients"] for state in accumulated], weights)
    if reduction == "sum":
        gradients = {name: g * (sum(weights) / num_new) for name, g in gradients.items()}
        return {"gradients": gradients, "weight": 1.0, "num_samples": 0.0, "is_set": False}
    return {
        "gradients": gradients,
        "weight": sum(weights) / num_new,
        "num_samples": sum(state["num_samples"] for state in accumulated) / num_new,
        "is_set": any(state["is_set"] for state in accumulated),
    }
