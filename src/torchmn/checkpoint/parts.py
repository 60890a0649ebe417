"""Sharded states in a checkpoint: each rank saves its parts, and loads those that it holds now.

A DTensor is saved as this rank's part with its place in the whole (`describe_part`). To load, the
parts that old ranks have saved are copied into what this rank holds now, one old rank after another
until it is complete. The device meshes of saving and loading may differ, and either may be missing.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchmn.base.errors import DataError
from torchmn.comm.local_tensors import (
    PART,
    describe_part,
    from_part,
    is_distributed,
    is_part,
    overlap,
)
from torchmn.exchange.replicas import parameters_of

Path = tuple[Any, ...]
# The tensor that a value at this place, whose whole has this shape, will be loaded into.
Targets = Callable[[Path, Sequence[int]], "Tensor | None"]


def targets_of(obj: Any) -> Targets:
    """A function that finds the tensors into which an object's state will be loaded. Local."""
    if isinstance(obj, Optimizer):
        parameters = parameters_of(obj)

        # A new optimizer has no state to look at: its moments are sharded as the parameter is.
        def of_parameter(path: Path, shape: Sequence[int]) -> Tensor | None:
            if len(path) < 3 or path[0] != "state" or path[1] not in range(len(parameters)):
                return None
            parameter: Tensor = parameters[path[1]]
            return parameter if list(parameter.shape) == list(shape) else None

        return of_parameter
    # Only DTensors matter here, and there are none unless this module was imported.
    state = obj.state_dict() if "torch.distributed.tensor" in sys.modules else {}

    def in_state(path: Path, shape: Sequence[int]) -> Tensor | None:
        value = _at(state, path)
        return value if isinstance(value, Tensor) else None

    return in_state


def nowhere(path: Path, shape: Sequence[int]) -> Tensor | None:
    """`Targets` to load every tensor whole: none has a sharded target."""
    return None


def place_parts(state: Any, targets: Targets, others: Iterable[Any], what: str) -> Any:
    """Return a saved state in which sharded tensors are the parts that this rank holds now. Local.

    ``others`` iterates over the states of all old ranks and is read no further than necessary.
    Raises DataError: the saved parts do not cover what this rank holds.
    """
    pieces: dict[Path, _Piece] = {}
    for path, value in _leaves(state, ()):
        part = _as_part(value)
        target = targets(path, part["shape"])
        if target is not None and not is_distributed(target):
            target = None
        if target is not None or is_part(value):
            pieces[path] = piece = _Piece(part, target)
            piece.take(part)
    if not pieces:
        return state
    missing = {path: piece for path, piece in pieces.items() if not piece.is_complete}
    for other in others if missing else ():
        for path, piece in missing.items():
            piece.take(_as_part(_at(other, path)))
        missing = {path: piece for path, piece in missing.items() if not piece.is_complete}
        if not missing:
            break
    for path in missing:
        name = "".join(f"[{key!r}]" for key in path)
        raise DataError(f"{what}{name}: the parts that were saved do not make up the whole")
    return _replaced(state, (), {path: piece.result() for path, piece in pieces.items()})


class _Piece:
    """A tensor, or this rank's part of it, while it is assembled from saved parts."""

    def __init__(self, like: Mapping[str, Any], target: Tensor | None) -> None:
        self._target = target
        dtype = like[PART].dtype
        if self._target is None:
            self._wanted = torch.empty(like["shape"], dtype=dtype, device="cpu")
            self._begin = [0] * len(like["shape"])
        else:
            own = describe_part(self._target)
            # On the CPU, as what is read: the device gets the complete part once, in `result`.
            self._wanted = torch.empty(own[PART].shape, dtype=dtype, device="cpu")
            self._begin = own["offsets"]
        self._shape = list(like["shape"])
        self._seen: set[tuple[int, ...]] = set()
        self._num_left = self._wanted.numel()

    @property
    def is_complete(self) -> bool:
        return self._num_left == 0

    def take(self, part: Any) -> None:
        """Copy the region that a saved part shares with it; ignore a part of another tensor."""
        if not is_part(part) or list(part["shape"]) != self._shape:
            return
        held = part[PART]
        region = (*part["offsets"], *held.shape)
        # Replicas have saved the same region: counted twice, the tensor would seem complete.
        if region in self._seen:
            return
        self._seen.add(region)
        shared = overlap(held.shape, part["offsets"], self._wanted.shape, self._begin)
        if shared is not None:
            source, target = shared
            self._wanted[target] = held[source]
            self._num_left -= held[source].numel()

    def result(self) -> Tensor:
        """The tensor to load: a DTensor if there is a target, else the whole tensor."""
        if self._target is None:
            return self._wanted
        return from_part(self._wanted.to(self._target.device), self._target)


def _as_part(value: Any) -> Any:
    """Describe a whole tensor as a part that covers it; return any other value unchanged."""
    if isinstance(value, Tensor):
        return {PART: value, "shape": list(value.shape), "offsets": [0] * value.dim()}
    return value


def _leaves(state: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Iterate over the tensors and parts in a state, each with its path of keys."""
    if isinstance(state, Tensor) or is_part(state):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            yield from _leaves(value, (*path, index))


def _at(state: Any, path: Path) -> Any:
    for key in path:
        try:
            state = state[key]
        except (LookupError, TypeError):
            return None
    return state


def _replaced(state: Any, path: Path, new: Mapping[Path, Tensor]) -> Any:
    if path in new:
        return new[path]
    if isinstance(state, Mapping) and not is_part(state):
        return type(state)(  # type: ignore[call-arg]
            (key, _replaced(value, (*path, key), new)) for key, value in state.items()
        )
    if type(state) in (list, tuple):
        return type(state)(
            _replaced(value, (*path, index), new) for index, value in enumerate(state)
        )
    return state
