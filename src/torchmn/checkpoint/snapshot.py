"""Copies of states in memory, so that training can continue while they are written.

Tensors are copied into one block of memory that is kept for the next save: page faults of a new
block would cost more than the copy itself. For tensors of a GPU the block is pinned.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchmn.base.errors import UsageError
from torchmn.comm import object_codec
from torchmn.comm.local_tensors import is_distributed, is_divided, local_part
from torchmn.comm.object_codec import Part
from torchmn.data.batch_settings import BatchSettings, batch_settings_by_name

_ALIGNMENT = 64
RANDOM = "random state"  # the name under which the generators are saved beside the user's objects


class Stateful(Protocol):
    """An object that can be saved."""

    def state_dict(self) -> Any:
        """Plain values and tensors."""

    def load_state_dict(self, state_dict: Any) -> object:
        """Restore a state in place."""


@runtime_checkable
class HasReplicatedTensors(Protocol):
    """An object that knows which tensors are bit-identical on all ranks."""

    def replicated_tensors(self) -> Sequence[Tensor]:
        """Return these tensors. Local."""


@dataclass(frozen=True, kw_only=True)
class SavedObject:
    """The description of one object, and the names of the tensors in it, in order."""

    body: Any
    parts: list[str]
    optimizer: str = ""  # the class, of an optimizer


@dataclass(frozen=True, kw_only=True)
class SavedRank:
    """A rank's saved objects by name, and for each tensor name the rank that wrote the tensor."""

    objects: dict[str, SavedObject]
    where: dict[str, int]
    # The sizes of the grid's axes; empty without one.
    grid: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """The copied state of a rank: described objects, tensors by name, names of replicated tensors.

    ``batches`` has the global batch by the name of each object that knows it.
    """

    objects: dict[str, SavedObject]
    tensors: dict[str, Tensor]
    replicated: list[str]
    batches: dict[str, BatchSettings] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class CopyMemory:
    """Memory for the copy of one state at a time. Local."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")

    def copy(
        self,
        state: Mapping[str, Stateful],
        random_state: object,
        *,
        with_replicated: bool = False,
        compares_parts: bool = False,
    ) -> Copy:
        """Copy the state of these objects; the copy is valid until the next call.

        With ``with_replicated`` the copy lists the tensors that objects report as replicated; with
        ``compares_parts`` also those of which this rank holds a part.

        Raises UsageError: an object has no ``state_dict``; UnsupportedError: see
        `object_codec.describe`.
        """
        described = {
            name: object_codec.describe(_state_of(name, obj), f"state['{name}']")
            for name, obj in state.items()
        }
        described[RANDOM] = object_codec.describe(random_state, RANDOM)
        names = _Names()
        listed = {
            label: SavedObject(
                body=body,
                parts=[names.of(label, part) for part in parts],
                optimizer=_optimizer_class(state.get(label)),
            )
            for label, (body, parts) in described.items()
        }
        replicated = {
            local_part(tensor).data_ptr()
            for obj in state.values()
            if with_replicated and isinstance(obj, HasReplicatedTensors)
            for tensor in obj.replicated_tensors()
            if local_part(tensor).numel()
            and (compares_parts or not (is_distributed(tensor) or is_divided(tensor)))
        }
        return Copy(
            objects=listed,
            replicated=[
                n for n, tensor in names.tensors.items() if tensor.data_ptr() in replicated
            ],
            tensors=self._copy(names.tensors),
            batches=batch_settings_by_name(state),
        )

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        begins, end = [], 0
        for tensor in tensors.values():
            begins.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        devices = {t.device for t in tensors.values() if t.is_cuda}
        if self._block.numel() < end:
            self._block = torch.empty(
                end, dtype=torch.uint8, pin_memory=bool(devices), device="cpu"
            )
        copies = {}
        for begin, (name, tensor) in zip(begins, tensors.items(), strict=True):
            place = self._block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[name] = place.copy_(tensor, non_blocking=tensor.is_cuda)
        # The copies are queued behind the kernels of training. Once `save` returns, training may
        # overwrite the tensors, and another thread reads the block: wait for the copies here.
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies


class _Names:
    """Gives each tensor a name in files, as ``model/conv1.weight``; shared memory gets one name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._by_memory: dict[tuple[object, ...], str] = {}

    def of(self, label: str, part: Part) -> str:
        tensor = part.tensor
        # Views of the same memory, such as tied weights, are saved once. Empty tensors have no
        # address by which to tell them apart.
        memory = (
            (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
            if tensor.numel()
            else (len(self.tensors),)
        )
        if memory not in self._by_memory:
            keys = [label, *(_plain(key) for key in part.path[1:])]
            # Escaped as in a JSON pointer (RFC 6901): keys may contain "/".
            name = base = "/".join(word.replace("~", "~0").replace("/", "~1") for word in keys)
            number = 2
            while name in self.tensors or name == "__metadata__":
                name, number = f"{base}~{number}", number + 1
            self.tensors[name] = tensor
            self._by_memory[memory] = name
        return self._by_memory[memory]


def _plain(key: str) -> str:
    """``'weight'`` without its quotes; other keys as they are."""
    return key[1:-1] if key[:1] in "'\"" else key


def _optimizer_class(obj: object) -> str:
    return type(getattr(obj, "inner", obj)).__name__ if isinstance(obj, Optimizer) else ""


def _state_of(name: str, obj: Any) -> object:
    method: Callable[[], object] | None = getattr(obj, "state_dict", None)
    if method is None or not hasattr(obj, "load_state_dict"):
        raise UsageError(
            f"state['{name}'] is a {type(obj).__name__}, which has no state_dict() and "
            "load_state_dict(). Give the object that holds the value."
        )
    return method()
