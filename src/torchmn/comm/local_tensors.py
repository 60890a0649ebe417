"""Parameters of which this rank holds a part, and the description of states that contain parts.

A parameter of `fully_shard` or `parallelize_module` is a DTensor: it has the shape of the whole
tensor, and this rank holds a part of it, which is what is sent, compared or saved. A parameter of
`torchmn.nn.ParallelLinear` is an ordinary tensor that is a part of a whole, described by its
`Division`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchmn.base.torch_private import layout_of, local_shape_and_offset, local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from torchmn.comm.base import Communicator

PART = "torchmn: part of a DTensor"
"""The key that marks a mapping as the description of a DTensor's part in a state."""


def is_distributed(tensor: object) -> bool:
    """Whether ``tensor`` is a DTensor. Local."""
    # A script that has DTensors has imported the module; importing it here takes time.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, as a view; any other tensor is returned as it is. Local."""
    if not is_distributed(tensor):
        return tensor
    local: Tensor = local_tensor(tensor)
    wait: Callable[[], Tensor] | None = getattr(local, "wait", None)
    return local if wait is None else wait()  # a functional collective may still be pending


@dataclass(frozen=True)
class Division:
    """How a tensor is divided among ranks, each of which holds its part as an ordinary tensor."""

    comm: Communicator
    dim: int
    """The dimension along which the tensor is divided."""


_DIVISIONS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The divisions of parameters. As attributes they would be pickled with the parameters."""


def divide(parameter: nn.Parameter, division: Division) -> None:
    """Register a parameter as this rank's part of a divided tensor. Local."""
    _DIVISIONS[parameter] = division


def division_of(tensor: Tensor) -> Division | None:
    """The division that a parameter is a part of; None if it is a whole tensor. Local."""
    if not _DIVISIONS:  # clipping of gradients calls this for every parameter
        return None
    division: Division | None = _DIVISIONS.get(tensor)
    return division


def is_divided(tensor: Tensor) -> bool:
    """Whether an ordinary tensor is one of several parts on different ranks. Local."""
    division = division_of(tensor)
    return division is not None and division.comm.size > 1


def from_part(local: Tensor, like: Tensor) -> Tensor:
    """A DTensor with this local part and the mesh and placements of ``like``. Local."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, layout_of(like), requires_grad=False)


def reshard(models: Sequence[nn.Module]) -> None:
    """Reshard the parameters of `fully_shard` that a forward has left unsharded. Local.

    torch keeps the last module of a model unsharded between forward and backward, and therefore
    also after a forward without a backward, as in evaluation. Until it is resharded, its parameters
    are not the objects that the optimizer has.
    """
    # As in `is_distributed`: unless this was imported, no model is sharded.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for model in models:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def placement_of(tensor: Tensor) -> str:
    """The part of a whole tensor that this rank holds, as text; empty for whole tensors."""
    division = division_of(tensor)
    if division is not None:
        return f", part {division.comm.rank} of {division.comm.size} along dim {division.dim}"
    if not is_distributed(tensor):
        return ""
    whole: DTensor = tensor  # type: ignore[assignment]
    mesh = whole.device_mesh
    return (
        f", part {tuple(mesh.get_coordinate() or ())} of a mesh of {tuple(mesh.shape)} by "
        f"{', '.join(str(placement) for placement in whole.placements)}"
    )


def describe_part(tensor: Tensor) -> dict[str, Any]:
    """The description of a DTensor in a state: its local part and the position in the whole."""
    local = local_part(tensor)
    shape, offsets = local_shape_and_offset(tensor)
    is_empty = local.numel() == 0
    return {
        PART: local.detach(),
        "shape": list(tensor.shape),
        "offsets": [0] * len(shape) if is_empty else [int(offset) for offset in offsets],
    }


def is_part(value: object) -> bool:
    """Whether a value in a state is the description of a DTensor's part."""
    return isinstance(value, Mapping) and PART in value


def with_parts(state: Any) -> Any:
    """A copy of a state in which DTensors are replaced by descriptions of this rank's parts."""
    if is_distributed(state):
        return describe_part(state)
    if type(state) in (dict, OrderedDict):
        return type(state)((key, with_parts(value)) for key, value in state.items())
    if type(state) in (list, tuple):
        return type(state)(with_parts(value) for value in state)
    return state


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """A copy of the part of ``whole`` that this rank holds of the DTensor ``like``. Local."""
    place = describe_part(like)
    held = place[PART].shape
    return whole[
        tuple(slice(o, o + n) for o, n in zip(place["offsets"], held, strict=True))
    ].clone()


Slices = tuple[slice, ...]


def overlap(
    held: Sequence[int], at: Sequence[int], wanted: Sequence[int], begin: Sequence[int]
) -> tuple[Slices, Slices] | None:
    """The intersection of two boxes, as slices into each; None if they do not overlap.

    The first box has shape ``held`` at offset ``at``, the second ``wanted`` at ``begin``.
    """
    source, target = [], []
    for size, offset, wanted_size, wanted_offset in zip(held, at, wanted, begin, strict=True):
        low = max(offset, wanted_offset)
        high = min(offset + size, wanted_offset + wanted_size)
        if high <= low:
            return None
        source.append(slice(low - offset, high - offset))
        target.append(slice(low - wanted_offset, high - wanted_offset))
    return tuple(source), tuple(target)
