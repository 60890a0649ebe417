"""Grids of ranks with named axes. Each axis has a communicator.

The last axis varies fastest, as in a `DeviceMesh`: with ``Grid(comm, data=2, model=4)`` ranks 0 to
3 share one model and ranks 4 to 7 another. So the ranks along the last axis are on one node if
nodes have enough ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from torchmn.base.errors import UsageError
from torchmn.comm.base import Communicator
from torchmn.comm.collective_checks import raise_if_values_differ
from torchmn.comm.transports.join import mesh_of_groups, torch_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Grid:
    """The ranks of a communicator as a grid of named axes. *Collective*, with the same arguments.

    ```python
    grid = torchmn.Grid(comm, data=-1, model=2)
    model = Stage(grid.model)  # split over the ranks of one model
    optimizer = torchmn.create_multi_node_optimizer(optimizer, grid.data, model)  # means of these
    ```
    ``grid.data`` is the communicator of the ranks whose coordinates differ from this rank's on the
    axis ``data`` only, in the order of that axis. The size of one axis may be -1 and is then
    inferred from the others.

    Attributes:
        comm: the communicator of all ranks.
        sizes: the size of each axis by name, in order.
        coordinates: the coordinate of this rank on each axis, by name.

    Raises:
        UsageError: the product of the sizes is not the number of ranks, or a size or a name is
            invalid.
        RankMismatchError: ranks gave different axes; all ranks raise.

    Example:
        >>> grid = torchmn.Grid(comm, data=-1, model=1)
        >>> grid.sizes, grid.coordinates, grid.data.size
        ({'data': 1, 'model': 1}, {'data': 0, 'model': 0}, 1)
        >>> grid.finalize()
    """

    def __init__(self, comm: Communicator, **axes: int) -> None:
        self.comm = comm
        gathered = comm.allgather_obj(", ".join(f"{name}={size}" for name, size in axes.items()))
        raise_if_values_differ(
            "Ranks called Grid()",
            [{"axes": text} for text in gathered],
            "All ranks must give the same axes in the same order.",
        )
        self.sizes = _sizes(comm, axes)
        self.coordinates: dict[str, int] = {}
        left, stride = comm.rank, comm.size
        strides = {}
        for name, size in self.sizes.items():
            stride //= size
            strides[name] = stride
            self.coordinates[name], left = divmod(left, stride)
        # Collective, once for each axis: all ranks have the same order, which was compared above.
        # The color of an axis is the rank with coordinate 0 on it and otherwise equal coordinates.
        self._axes = {
            name: comm.split(comm.rank - self.coordinates[name] * strides[name], comm.rank)
            for name in self.sizes
        }

    def __getattr__(self, name: str) -> Communicator:
        # From __dict__: `self._axes` would call this method again before __init__ has set it.
        axes: dict[str, Communicator] = self.__dict__.get("_axes", {})
        if name not in axes:
            raise AttributeError(
                f"This grid has no axis '{name}'; it has {', '.join(axes)}. Where a communicator "
                "is wanted, give that of an axis, as grid.data, or that of all ranks, grid.comm."
            )
        return axes[name]

    @property
    def replicas(self) -> Communicator:
        """The communicator of the first axis: by convention ranks that hold the same model part."""
        return next(iter(self._axes.values()))

    def device_mesh(self, *names: str) -> DeviceMesh:
        """A DeviceMesh of the named axes, for torch's own parallelism. *Collective.*

        All axes by default. ``fully_shard(module, mesh=grid.device_mesh("model"))`` shards over the
        ranks of one model. Raises UsageError: an axis does not exist, or the axes are not in the
        order of the grid; UnsupportedError: see `Communicator.process_group`.
        """
        chosen = names or tuple(self.sizes)
        if list(chosen) != [name for name in self.sizes if name in chosen]:
            raise UsageError(
                f"device_mesh{chosen}: the axes of this grid are {tuple(self.sizes)}. Name some of "
                "them, in this order."
            )
        place = tuple(
            slice(None) if name in chosen else self.coordinates[name] for name in self.sizes
        )
        groups = [self._axes[name].process_group for name in chosen]
        ranks = torch.tensor(torch_ranks(self.comm), device="cpu", dtype=torch.int)
        mesh = ranks.view(*self.sizes.values())[place]
        return mesh_of_groups(groups, chosen, mesh, self.comm.device.type)

    def finalize(self) -> None:
        """Finalize the communicators of all axes, but not ``comm``. *Collective.*"""
        for axis in self._axes.values():
            axis.finalize()

    def __copy__(self) -> Grid:
        return self

    def __deepcopy__(self, memo: object) -> Grid:
        """Return the grid itself: copies of a model share it."""
        return self

    def __repr__(self) -> str:
        axes = ", ".join(
            f"{name}={self.coordinates[name]} of {size}" for name, size in self.sizes.items()
        )
        return f"<Grid {self.comm.rank_label}, {axes}>"


def num_model_parts(sizes: Mapping[str, int]) -> int:
    """The number of ranks that share one model: the product of all sizes but the first."""
    return math.prod(list(sizes.values())[1:])


def _sizes(comm: Communicator, axes: Mapping[str, int]) -> dict[str, int]:
    """The size of every axis, with -1 replaced. Raises UsageError."""
    text = ", ".join(f"{name}={size}" for name, size in axes.items())
    if not axes:
        raise UsageError(f"{comm.rank_label}: Grid(comm) needs axes, such as data=-1, model=2.")
    own = {*dir(Grid), "comm", "sizes", "coordinates"}
    taken = [name for name in axes if name in own]
    if taken:
        raise UsageError(
            f"{comm.rank_label}: an axis cannot be called '{taken[0]}', which is a name of Grid's "
            "own. Choose another one."
        )
    is_right = [type(size) is int and (size > 0 or size == -1) for size in axes.values()]
    if not all(is_right) or list(axes.values()).count(-1) > 1:
        raise UsageError(
            f"{comm.rank_label}: Grid({text}): sizes are 1 or more, and one of them may be -1 for "
            "what the others leave."
        )
    product = math.prod(size for size in axes.values() if size != -1)
    if comm.size % product or (-1 not in axes.values() and product != comm.size):
        raise UsageError(
            f"{comm.rank_label}: Grid({text}): the sizes multiply to {product}, and there are "
            f"{comm.size} ranks. Their product must be the number of ranks"
            f"{', or divide it' if -1 in axes.values() else '; one of them may be -1'}."
        )
    return {name: comm.size // product if size == -1 else size for name, size in axes.items()}
