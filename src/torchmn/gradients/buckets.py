"""Gradients laid out in flat buffers: what one exchange carries.

A bucket holds parameters of one dtype and device, in one fixed order on all ranks. Every parameter
has a slot, a tensor of its own shape and strides in the bucket's memory. With
``gradient_as_bucket_view`` ``p.grad`` *is* that slot after an exchange: a mean needs no copy back.
The last bucket ends with the footer: the weight of this rank, whether it is active, and (if asked
for) which parameters have a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torchmn.communicators.allreduce import ReduceBlock
from torchmn.communicators.base import Granularity
from torchmn.compression import Layout

NamedParameter = tuple[str, nn.Parameter]
Allocate = Callable[[int, torch.dtype, torch.device], Tensor]

_NARROW = (torch.float16, torch.bfloat16)
_ALIGNMENT = 16  # elements; slots start at a multiple of a vector's width


@dataclass
class Bucket:
    """Parameters that travel together."""

    index: int
    names: list[str]
    parameters: list[nn.Parameter]
    buffer: Tensor
    slots: list[Tensor]
    cargo: ReduceBlock
    spans: list[tuple[int, int]] = field(default_factory=list)
    """The elements of the buffer that are of each parameter: the first, and one past the last."""

    def __post_init__(self) -> None:
        self._addresses = [slot.data_ptr() for slot in self.slots]

    @property
    def footer(self) -> Tensor:
        """What is never encoded; empty but for the last bucket."""
        return self.cargo.exact

    def pack(self, position: int, scale: float) -> bool:
        """Write ``scale`` times the gradient of one parameter into its slot (zeros if None).

        Returns whether the gradient was in the slot already: added to an earlier mean.
        """
        grad, slot = self.parameters[position].grad, self._slot(position)
        if grad is None or scale == 0.0:  # zero weight: even NaN, the mean of nothing, has none
            slot.zero_()
            return False
        if grad.data_ptr() != slot.data_ptr():
            # With create_graph=True a gradient has a graph, which no mean over ranks can keep.
            torch.mul(grad.detach() if grad.requires_grad else grad, scale, out=slot)
            return False
        if scale != 1.0:
            slot.mul_(scale)
        return grad is slot

    def _slot(self, position: int) -> Tensor:
        """The slot; made again if it was given other memory, as ``p.grad.data = ...`` does."""
        slot = self.slots[position]
        if slot.data_ptr() != self._addresses[position]:
            start = self.spans[position][0]
            slot = self.slots[position] = _slot(self.buffer, start, self.parameters[position])
        return slot

    def expose(self) -> None:
        """Make the ``p.grad`` of every trainable parameter its slot."""
        for position, parameter in enumerate(self.parameters):
            slot = self._slot(position)
            is_wanted = parameter.requires_grad or parameter.grad is not None
            if parameter.grad is not slot and is_wanted:
                parameter.grad = slot


def new_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in ordinary memory."""
    return torch.zeros(numel, dtype=dtype, device=device)


def plan_buckets(
    parameters: Sequence[NamedParameter],
    *,
    granularity: Granularity,
    bucket_bytes: int,
    num_footer: int,
    has_own_footer: bool = False,
    footer_device: torch.device | None = None,
    allocate: Allocate = new_zeros,
) -> list[Bucket]:
    """Lay out parameters in the order in which their gradients are expected.

    ``parameters`` come in the order of registration: backward meets them about in reverse.
    ``naive`` has one bucket per parameter sorted by name, ``flat`` one per dtype and device. The
    footer ends the last bucket; it has a bucket of its own if asked for, beside 16 bits, in which
    it would miscount, and on ``footer_device`` where there are no parameters. A pure function of
    facts that are the same on all ranks, but for ``allocate``, which may be collective.
    """
    if granularity == "parameter":
        groups = [[item] for item in sorted(parameters, key=lambda item: item[0])]
    elif granularity == "everything":
        groups = _by_kind(parameters)
    else:
        groups = [
            part
            for kind in _by_kind(list(reversed(parameters)))
            for part in _cut(kind, bucket_bytes)
        ]
    if not groups:
        return (
            [] if footer_device is None else [_own_footer(0, num_footer, footer_device, allocate)]
        )
    buckets = []
    is_narrow = groups[-1][0][1].dtype in _NARROW
    needs_own_footer = has_own_footer or is_narrow
    for index, group in enumerate(groups):
        is_last = index == len(groups) - 1
        buckets.append(
            _lay_out(index, group, num_footer if is_last and not needs_own_footer else 0, allocate)
        )
    if needs_own_footer:
        dtype = torch.float32 if is_narrow else buckets[-1].buffer.dtype
        device = groups[-1][0][1].device
        buckets.append(_own_footer(len(groups), num_footer, device, allocate, dtype))
    return buckets


def _own_footer(
    index: int,
    num_footer: int,
    device: torch.device,
    allocate: Allocate,
    dtype: torch.dtype = torch.float32,
) -> Bucket:
    footer = allocate(num_footer, dtype, device)
    return Bucket(index, [], [], footer, [], ReduceBlock(footer, Layout((), dtype), num_footer))


def _by_kind(parameters: Sequence[NamedParameter]) -> list[list[NamedParameter]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[NamedParameter]] = {}
    for name, parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    return list(kinds.values())


def _cut(parameters: Sequence[NamedParameter], bucket_bytes: int) -> list[list[NamedParameter]]:
    """Consecutive parts of at least ``bucket_bytes``, but for the last."""
    parts: list[list[NamedParameter]] = []
    part: list[NamedParameter] = []
    nbytes = 0
    for name, parameter in parameters:
        part.append((name, parameter))
        nbytes += parameter.nbytes
        if nbytes >= bucket_bytes:
            parts.append(part)
            part, nbytes = [], 0
    if part:
        parts.append(part)
    return parts


def _lay_out(
    index: int, group: Sequence[NamedParameter], num_footer: int, allocate: Allocate
) -> Bucket:
    first = group[0][1]
    dtype = first.dtype.to_real() if first.dtype.is_complex else first.dtype
    sizes = [p.numel() * (2 if p.dtype.is_complex else 1) for _, p in group]
    starts = []
    end = 0
    for size in sizes:
        starts.append(end)
        end += math.ceil(size / _ALIGNMENT) * _ALIGNMENT
    buffer = allocate(end + num_footer, dtype, first.device)
    slots = [
        _slot(buffer, start, parameter) for start, (_, parameter) in zip(starts, group, strict=True)
    ]
    layout = Layout.of(
        (
            (name, start, shape_in_memory(slot))
            for start, (name, _), slot in zip(starts, group, slots, strict=True)
        ),
        dtype,
    )
    return Bucket(
        index,
        [name for name, _ in group],
        [parameter for _, parameter in group],
        buffer,
        slots,
        ReduceBlock(buffer, layout, num_footer),
        [(start, start + size) for start, size in zip(starts, sizes, strict=True)],
    )


def _slot(buffer: Tensor, start: int, parameter: nn.Parameter) -> Tensor:
    """A tensor in the buffer's memory with the parameter's shape and, if dense, its strides.

    It is an alias made with `set_`, not a view: `detach_` and `zero_grad` treat it as any gradient.
    """
    shape = parameter.shape
    strides = (
        parameter.stride() if is_dense(parameter) else torch.empty(shape, device="meta").stride()
    )
    alias = torch.empty(0, dtype=parameter.dtype, device=buffer.device)
    offset = buffer.storage_offset() + start
    if parameter.dtype.is_complex:
        offset //= 2  # in elements of the alias
    return alias.set_(buffer.untyped_storage(), offset, shape, strides)


def shape_in_memory(slot: Tensor) -> tuple[int, ...]:
    """The slot's dims in the order of its memory; of complex numbers with the two real parts."""
    dims = sorted(zip(slot.stride(), slot.shape, strict=True), key=lambda dim: -dim[0])
    return (*(size for _, size in dims), *((2,) if slot.is_complex() else ()))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in any order of dims."""
    dims = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return False
        expected *= size
    return True
