"""Resharding: the state that each new rank loads, made from the states of all old ranks.

    inner optimizer    unchanged if equal on all old ranks; else, inside a block, the mean over
                       ranks; whole numbers and counts of steps are rank 0's
    codecs             the residuals are distributed among the ranks that encode
    the schedule       its own `reshard_state_dict`; without one, rank 0's state

All functions are local and pure: every new rank is given the states of all old ranks and computes
its own part of the same whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchmn.base.errors import UsageError
from torchmn.comm import Communicator
from torchmn.comm.codecs.residuals import reshard

State = dict[str, Any]


@runtime_checkable
class Resharding(Protocol):
    """An object whose state differs between ranks, or depends on the number of ranks."""

    def reshard_state_dict(self, states: Sequence[Any], comm: Communicator) -> Any:
        """Return the state that this rank loads, from those of all old ranks in rank order.

        Local. Called when the number of ranks has changed. The states share memory with each other:
        the returned state is a copy wherever it was changed.
        """


@runtime_checkable
class HasResumeWarnings(Protocol):
    """An object that does not continue exactly on another number of ranks."""

    def resume_warnings(self) -> Sequence[str]:
        """Describe the differences if another number of ranks loads its state. Local."""


def raise_if_other_optimizer(target: Optimizer, state: Any, saved_class: str) -> None:
    """Raise UsageError if a state was saved by an optimizer class with other options. Local.

    Classes that share their options, such as Adam and AdamW, load each other's state.
    """
    own_class = type(getattr(target, "inner", target)).__name__
    # By what the new optimizer needs, not by class: a state of Adam continues in AdamW.
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    missing = set(target.defaults).difference(*(groups or [target.defaults]))
    if saved_class not in ("", own_class) and missing:
        raise UsageError(
            f"The state was saved by {saved_class} and cannot be loaded by {own_class}, which also "
            f"needs {', '.join(sorted(missing))}. Resume with {saved_class}, or without the "
            "optimizer's state: leave it out of what is resumed."
        )


def reshard_object(target: object, states: Sequence[State], comm: Communicator) -> State:
    """Return the state to load into ``target``: rank 0's, unless it is `Resharding`. Local."""
    if isinstance(target, Resharding):
        state: State = target.reshard_state_dict(states, comm)
        return state
    return states[0]


def for_other_split(state: Any, label: str) -> Any:
    """Return a state for ranks among which the model is split in another way. Local.

    From a multi-node optimizer's state the residuals of codecs are removed. Raises UsageError: it
    was saved inside a block, whose anchors would be lost, or with a pending or accumulated
    gradient.
    """
    own = state.get("torchmn") if isinstance(state, Mapping) else None
    if own is None:
        return state
    if own.get("anchors") or own.get("pending") or "accumulated" in own:
        raise UsageError(
            f"'{label}' was saved in the middle of a block, a step late or between two passes of a "
            "step, and the model is split otherwise now. Resume on the grid that has saved it, or "
            "call optimizer.flush() before saving."
        )
    kept = {name: own[name] for name in ("schedule", "optimizer", "progress") if name in own}
    return {**state, "torchmn": kept}


def warnings_of(target: object) -> list[str]:
    """The `resume_warnings` of an object; empty if it has none. Local."""
    return list(target.resume_warnings()) if isinstance(target, HasResumeWarnings) else []


def reshard_codec(states: Sequence[State], comm: Communicator) -> State:
    """Return the `codec_state` that this rank loads, from those of all old ranks. Local.

    Ranks that encode nothing on this route (all but the leaders of nodes) get no residuals.
    """
    held = [state["state"] for state in states if state.get("state")]
    if not any("residuals" in state for state in held):
        return {"rank": comm.rank, "size": comm.size, "state": held[0]} if held else {}
    group = comm.route.inter_node_group
    # Old ranks that encoded nothing have an empty memory: take what all share from one that has.
    fullest = max(held, key=lambda state: len(state["residuals"]))
    state = {**reshard(held, 1 if group is None else group.size)}
    state = {**fullest, "residuals": [] if group is None else state["residuals"]}
    return {"rank": comm.rank, "size": comm.size, "state": state}


def reshard_inner(states: Sequence[State]) -> State:
    """Return the inner optimizer's state, the same for all new ranks. Local."""
    return {
        **{name: value for name, value in states[0].items() if name != "torchmn"},
        "state": mean_state([state["state"] for state in states]),
    }


def mean_state(values: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
    """Combine nested mappings and lists: means of tensors, rank 0's value of anything else. Local.

    Elements that some ranks lack are the mean of the others. Tensors that are bit-identical on all
    ranks stay so; those of whole numbers, and scalars such as Adam's step count, are rank 0's.
    """
    first = values[0]
    if isinstance(first, Mapping):
        weights = weights or [1.0] * len(values)
        keys = dict.fromkeys(key for value in values for key in value)
        parts = {
            key: [(v[key], w) for v, w in zip(values, weights, strict=True) if key in v]
            for key in keys
        }
        return {
            key: mean_state([v for v, _ in part], [w for _, w in part])
            for key, part in parts.items()
        }
    if isinstance(first, (list, tuple)):
        same = [value for value in values if len(value) == len(first)]
        return type(first)(
            mean_state(part, weights if len(same) == len(values) else None)
            for part in zip(*same, strict=True)
        )
    if isinstance(first, Tensor):
        return mean_tensor(values, weights)
    return first


def mean_tensor(tensors: Sequence[Any], weights: Sequence[float] | None = None) -> Tensor:
    """The mean of one tensor over ranks, computed in float64 and weighted by ``weights``. Local."""
    first: Tensor = tensors[0]
    same = [t for t in tensors if isinstance(t, Tensor) and t.shape == first.shape]
    is_number = first.is_floating_point() or first.is_complex()
    if first.dim() == 0 or not is_number or all(torch.equal(first, t) for t in same[1:]):
        # A copy: torch's optimizers go on using the tensors that they load, and states share them.
        return first.clone()
    if weights is None or len(same) < len(tensors) or not sum(weights):
        weights = [1.0] * len(same)
    wide = torch.complex128 if first.is_complex() else torch.float64
    total = torch.zeros(first.shape, dtype=wide, device=first.device)
    for tensor, weight in zip(same, weights, strict=True):
        if weight:
            total += tensor.to(total) * weight
    return (total / sum(weights)).to(first.dtype)
