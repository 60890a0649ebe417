"""Parameters of which this process holds a part, and how a state that holds parts is described.

A parameter of `fully_shard` or `parallelize_module` is a DTensor: its shape is that of the whole,
and this rank holds a part of it. What is sent, compared or saved is that part. A parameter of
`torchmn.links.ParallelLinear` is an ordinary tensor that is a part, as its `Division` says.
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
"""The key of a mapping that stands for this rank's part in a state."""


def is_distributed(tensor: object) -> bool:
    """Whether it is a DTensor. Local; it imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; any other tensor itself. Local."""
    if not is_distributed(tensor):
        return tensor
    local: Tensor = local_tensor(tensor)
    wait: Callable[[], Tensor] | None = getattr(local, "wait", None)
    return local if wait is None else wait()  # a functional collective may still be under way


@dataclass(frozen=True)
class Division:
    """How a whole tensor is divided among ranks, of which each holds a part as a plain tensor."""

    comm: Communicator
    dim: int
    """The dimension that is cut."""


_DIVISIONS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Not attributes of the parameters, which would be pickled with them."""


def divide(parameter: nn.Parameter, division: Division) -> None:
    """Note that a parameter is this rank's part of a whole. Local."""
    _DIVISIONS[parameter] = division


def division_of(tensor: Tensor) -> Division | None:
    """How the whole is divided of which this parameter is a part; None if it is whole. Local."""
    if not _DIVISIONS:  # asked of every parameter when gradients are clipped
        return None
    division: Division | None = _DIVISIONS.get(tensor)
    return division


def is_divided(tensor: Tensor) -> bool:
    """Whether it is a plain tensor of which other ranks hold other parts. Local."""
    division = division_of(tensor)
    return division is not None and division.comm.size > 1


def from_part(local: Tensor, like: Tensor) -> Tensor:
    """A DTensor of this part, which it keeps, placed as another one. Local."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, layout_of(like), requires_grad=False)


def reshard(models: Sequence[nn.Module]) -> None:
    """Make parameters of `fully_shard` shards again, which a forward may leave whole. Local.

    The last module of a model stays whole between forward and backward, and so after a forward
    without one, as in evaluation. Its parameters are then other objects than the optimizer's.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for model in models:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def placement_of(tensor: Tensor) -> str:
    """Which part of the whole this rank holds, as text for comparisons; empty for any other."""
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
    """What stands for a DTensor in a state: the local part, and where it is in the whole."""
    local = local_part(tensor)
    shape, offsets = local_shape_and_offset(tensor)
    is_empty = local.numel() == 0
    return {
        PART: local.detach(),
        "shape": list(tensor.shape),
        "offsets": [0] * len(shape) if is_empty else [int(offset) for offset in offsets],
    }


def is_part(value: object) -> bool:
    """Whether it stands for a DTensor."""
    return isinstance(value, Mapping) and PART in value


def with_parts(state: Any) -> Any:
    """A state in which this rank's parts stand for DTensors; containers are copied."""
    if is_distributed(state):
        return describe_part(state)
    if type(state) in (dict, OrderedDict):
        return type(state)((key, with_parts(value)) for key, value in state.items())
    if type(state) in (list, tuple):
        return type(state)(with_parts(value) for value in state)
    return state


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """A copy of the part of a whole tensor that this rank holds of a DTensor. Local."""
    place = describe_part(like)
    held = place[PART].shape
    return whole[
        tuple(slice(o, o + n) for o, n in zip(place["offsets"], held, strict=True))
    ].clone()


Slices = tuple[slice, ...]


def overlap(
    held: Sequence[int], at: Sequence[int], wanted: Sequence[int], begin: Sequence[int]
) -> tuple[Slices, Slices] | None:
    """What two boxes of these shapes and places share, as slices of each; None if nothing."""
    source, target = [], []
    for size, offset, wanted_size, wanted_offset in zip(held, at, wanted, begin, strict=True):
        low = max(offset, wanted_offset)
        high = min(offset + size, wanted_offset + wanted_size)
        if high <= low:
            return None
        source.append(slice(low - offset, high - offset))
        target.append(slice(low - wanted_offset, high - wanted_offset))
    return tuple(source), tuple(target)
