"""Parameters that are sharded among ranks of one model, and how this rank exchanges its own part.

A parameter of `fully_shard` or `parallelize_module` is a DTensor. Each rank holds a part of it, and
the ranks that hold the same part of the other copies of the model are its counterparts: these are
the ranks of the communicator. What they exchange is a gradient of the size of the part.

A `LocalShard` stands for such a parameter wherever gradients are laid out, summed and averaged. Its
memory is that of the part, and its ``grad`` that of the parameter's: all of that code is written
for parameters that are whole. What the optimizer and the script see stays the DTensor.

``p.grad`` is final when torch calls the parameter's hooks: `fully_shard` calls them itself once it
has reduced a gradient over the ranks of its mesh, at the end of the backward pass for some.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchmn.comm.local_tensors import from_part, is_distributed, local_part

NamedParameter = tuple[str, nn.Parameter]


class LocalShard(nn.Parameter):
    """This rank's part of a DTensor parameter, in its memory. Local, but for `grad`."""

    whole: nn.Parameter

    def __new__(cls, whole: nn.Parameter) -> LocalShard:
        """What stands for ``whole``, a DTensor."""
        shard = torch.Tensor._make_subclass(cls, local_part(whole).detach(), False)
        shard.whole = whole
        return shard

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalShard:
        raise TypeError("A LocalShard stands for a parameter of a model; copy that.")

    def follow(self) -> None:
        """Continue in the memory that the part has now: `nn.Module.to` and others replace it."""
        local = local_part(self.whole).detach()
        if (local.data_ptr(), local.dtype, local.shape) != (
            self.data_ptr(),
            self.dtype,
            self.shape,
        ):
            self.data = local

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the parameter is trained."""
        return self.whole.requires_grad

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of the parameter's gradient.

        *Collective* over the mesh where the gradient is not placed as the parameter is, as that of
        a replicated parameter whose layer saw a part of the sequence: it is then summed first.
        """
        grad = self.whole.grad
        if grad is None or grad.requires_grad or not is_distributed(grad):
            return grad
        if grad.placements != self.whole.placements:  # type: ignore[attr-defined]
            placements = self.whole.placements  # type: ignore[attr-defined]
            with torch.no_grad():
                grad = grad.redistribute(placements=placements)  # type: ignore[attr-defined]
                local = local_part(grad)
                self.whole.grad = grad = from_part(local, self.whole)
        return local_part(grad)

    @grad.setter
    def grad(self, local: Tensor | None) -> None:
        self.whole.grad = None if local is None else from_part(local, self.whole)

    @property
    def _post_accumulate_grad_hooks(self) -> Any:  # type: ignore[override]
        return self.whole._post_accumulate_grad_hooks


class LocalShards:
    """The `LocalShard` of each DTensor parameter, the same one each time. Local."""

    def __init__(self) -> None:
        self._of: dict[Tensor, LocalShard] = {}

    @property
    def exist(self) -> bool:
        """Whether there are DTensors among the parameters."""
        return bool(self._of)

    def of(self, parameter: Tensor) -> Tensor:
        """What stands for a parameter: itself, unless it is a DTensor."""
        shard = self._of.get(parameter)
        if shard is None and is_distributed(parameter):
            shard = self._of[parameter] = LocalShard(cast(nn.Parameter, parameter))
        return parameter if shard is None else shard

    def named(self, parameters: Iterable[NamedParameter]) -> list[NamedParameter]:
        """The same parameters, with shards in place of DTensors."""
        return [(name, cast(nn.Parameter, self.of(parameter))) for name, parameter in parameters]

    def follow(self) -> None:
        """See `LocalShard.follow`."""
        for shard in self._of.values():
            shard.follow()


def whole_of(parameter: Tensor) -> Tensor:
    """The parameter that the optimizer and the model have. Local."""
    return parameter.whole if isinstance(parameter, LocalShard) else parameter
