"""Gradients laid out in flat buffers, the buckets, which are sent one by one.

A bucket holds gradients of one dtype and device, in one order that is the same on all ranks, and is
sent as a whole. Every parameter has a `Slot`, a tensor of its own shape and strides in the bucket's
memory. The last bucket ends with the footer (see `torchmn.exchange.agreements.footer`), which no
codec encodes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from torchmn.comm.allreduce import ReduceBlock
from torchmn.comm.codecs import Layout
from torchmn.comm.engine import Work
from torchmn.comm.routes.base import Granularity
from torchmn.comm.streams import Event
from torchmn.exchange.gradient_memory import CAN_COUNT, num_references
from torchmn.exchange.parameter_hook import Arrivals

NamedParameter = tuple[str, nn.Parameter]
Allocate = Callable[[int, torch.dtype, torch.device], Tensor]

_NARROW = (torch.float16, torch.bfloat16)
_ALIGNMENT = 16  # elements; slots start at a multiple of a vector's width
_SMALL_NBYTES = 16 << 10
"""Gradients up to this size are written together. A larger one is written at once, while it is in
the cache, so that the next layer's gradient can use its memory again: to keep all of them until
they are written together would cost 10,000 page faults per step for 60 MB."""
_SMALL_NBYTES_ON_GPU = 16 << 20
"""The same limit on a GPU, where each larger gradient takes a kernel launch of its own."""


@dataclass(eq=False, slots=True)
class Slot:
    """The memory of one parameter's gradient in a bucket."""

    name: str
    parameter: nn.Parameter
    tensor: Tensor
    """A tensor in the bucket's memory, with the parameter's shape and, if it is dense, strides."""
    start: int
    """Index of the first element in the bucket."""
    end: int
    """Index one past the last element."""
    address: int = 0
    """The address of `tensor`, by which a script that gave it other memory is noticed."""
    may_lend: bool = False
    """Whether the memory may become ``p.grad`` and stay with the script: not if ranks share it."""
    is_small: bool = False
    """Whether its gradient is written together with others, once all of them are final."""
    number: int = -1
    """The position of its parameter among those that are watched, see `BucketSet.number`."""
    weak_bucket: weakref.ref[Bucket] = field(init=False)
    """A weak reference, as the bucket refers to its slots: without a cycle both are freed at
    once."""
    is_packed: bool = False
    """Whether the slot has been written in the exchange that is being filled."""
    has_gradient: bool = False
    """Whether there was a gradient to write."""
    unused: tuple[int, int, int] | None = None
    """The `num_references` before `tensor` first became ``p.grad``; None if it never did."""

    @property
    def bucket(self) -> Bucket:
        """The bucket to which the slot belongs; the bucket set keeps it alive."""
        bucket = self.weak_bucket()
        assert bucket is not None  # noqa: S101 - its set keeps it
        return bucket

    def current_tensor(self) -> Tensor:
        """Return `tensor`, created anew if a script moved it by ``p.grad.data = ...``."""
        if self.tensor.data_ptr() != self.address:
            self.tensor = _alias(self.bucket.buffer, self.start, self.parameter)
        return self.tensor

    @property
    def suits_parameter(self) -> bool:
        """Whether `tensor` can be ``p.grad``: not if the parameter was converted meanwhile."""
        tensor, parameter = self.tensor, self.parameter
        return tensor.dtype == parameter.dtype and tensor.device == parameter.device

    def lend(self) -> None:
        """Set ``p.grad`` to `tensor`; its memory is not written again while a script uses it."""
        if self.parameter.grad is not self.tensor:
            if self.unused is None:
                self.unused = num_references(self)
            self.parameter.grad = self.tensor

    @property
    def values(self) -> Tensor:
        """The elements in the bucket's buffer, (numel,)."""
        return self.bucket.buffer[self.start : self.end]

    def follow(self) -> None:
        """Move to the memory that the bucket has now; ``p.grad`` stays in the old memory."""
        self.tensor = _alias(self.bucket.buffer, self.start, self.parameter)
        self.address, self.unused = self.tensor.data_ptr(), None


@dataclass(eq=False)
class Bucket(ReduceBlock):
    """A flat buffer that is sent as a whole."""

    index: int = 0
    slots: list[Slot] = field(default_factory=list)
    runs: list[Tensor] = field(default_factory=list)
    """The memory of the small slots; neighbouring slots are one tensor."""
    small: list[Slot] = field(default_factory=list)
    """The slots whose gradients are written together."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    """The parameters of small slots whose gradients are final in this pass, and the streams on
    which gradients of all slots were computed."""
    num_packed: int = 0
    """Number of slots that have been written."""
    written: Event | None = None
    """An event after the kernels that wrote the slots; None on a CPU."""
    totals: list[Tensor] = field(default_factory=list)
    """Sums of the values that were written; a sum that is finite shows that the values are."""
    work: Work[None] | None = None
    """The sum over ranks that is under way."""

    def find_runs(self) -> None:
        """Set `runs` to views of the buffer's current memory."""
        self.runs = []
        for is_small, group in groupby(self.slots, attrgetter("is_small")):
            slots = list(group)
            start, end = slots[0].start, slots[-1].end
            if is_small and end > start:
                self.runs.append(self.buffer[start:end])

    def follow(self) -> None:
        """Move all slots to the buffer's current memory; every ``p.grad`` stays in the old one."""
        for slot in self.slots:
            slot.follow()
        self.find_runs()


def new_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, (numel,), in ordinary memory. Local."""
    return torch.zeros(numel, dtype=dtype, device=device)


def plan_buckets(
    parameters: Sequence[NamedParameter],
    *,
    granularity: Granularity,
    bucket_bytes: int,
    num_footer: int,
    first_bytes: int | None = None,
    footer_device: torch.device | None = None,
    allocate: Allocate = new_zeros,
) -> list[Bucket]:
    """Lay out parameters in the order in which their gradients are expected.

    A pure function of facts that are the same on all ranks, except for ``allocate``, which may be
    *collective*.

    Args:
        parameters: in the order of registration; backward computes gradients roughly in reverse.
        granularity: ``parameter``: one bucket each, sorted by name; ``everything``: one for each
            dtype and device; otherwise by ``bucket_bytes``.
        bucket_bytes: the least size of a bucket, except the first ones and the last one of a dtype
            and device.
        num_footer: number of elements of the footer, which ends the last bucket. It has a bucket of
            its own if that bucket is in 16 bits, which cannot count far enough.
        first_bytes: the least size of the first bucket, if that is smaller. Each of the next ones
            has twice the size of the one before, up to ``bucket_bytes``: sums begin early, and the
            next bucket is full before a slow link has sent the one before.
        footer_device: the device of the footer if there are no parameters; None: no buckets then.
        allocate: returns zeros of a size, dtype and device.
    """
    if granularity == "parameter":
        groups = [[item] for item in sorted(parameters, key=lambda item: item[0])]
    elif granularity == "everything":
        groups = _by_kind(parameters)
    else:
        groups = [
            part
            for kind in _by_kind(list(reversed(parameters)))
            for part in _in_parts(kind, bucket_bytes, first_bytes or bucket_bytes)
        ]
    has_own_footer, footer_dtype = not groups, torch.float32
    if groups:
        last = groups[-1][0][1]
        footer_device = last.device
        if last.dtype in _NARROW:  # these count exactly only up to 2048, or 256 in bfloat16
            has_own_footer = True
        else:
            footer_dtype = last.dtype.to_real() if last.dtype.is_complex else last.dtype
    elif footer_device is None:
        return []
    buckets = [
        _lay_out(group, 0 if has_own_footer or group is not groups[-1] else num_footer, allocate)
        for group in groups
    ]
    if has_own_footer:
        footer = allocate(num_footer, footer_dtype, footer_device)
        buckets.append(Bucket(footer, Layout((), footer_dtype), num_footer))
    for index, bucket in enumerate(buckets):
        bucket.index = index
    return buckets


def _by_kind(parameters: Sequence[NamedParameter]) -> list[list[NamedParameter]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[NamedParameter]] = {}
    for name, parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    return list(kinds.values())


def _in_parts(
    parameters: Sequence[NamedParameter], bucket_bytes: int, first_bytes: int
) -> list[list[NamedParameter]]:
    """Split into consecutive parts, see `plan_buckets`."""
    parts: list[list[NamedParameter]] = []
    part: list[NamedParameter] = []
    nbytes, least = 0, min(bucket_bytes, first_bytes)
    for name, parameter in parameters:
        part.append((name, parameter))
        nbytes += parameter.nbytes
        if nbytes >= least:
            parts.append(part)
            part, nbytes, least = [], 0, min(bucket_bytes, 2 * least)
    if part:
        parts.append(part)
    return parts


def _lay_out(group: Sequence[NamedParameter], num_footer: int, allocate: Allocate) -> Bucket:
    first = group[0][1]
    # Pairs of real numbers: neither all transports nor codecs know complex ones.
    dtype = first.dtype.to_real() if first.dtype.is_complex else first.dtype
    sizes = [p.numel() * (2 if p.dtype.is_complex else 1) for _, p in group]
    starts = []
    end = 0
    for size in sizes:
        starts.append(end)
        end += math.ceil(size / _ALIGNMENT) * _ALIGNMENT
    buffer = allocate(end + num_footer, dtype, first.device)
    # Memory that ranks share is wrapped by torch.frombuffer, whose storage cannot be resized. What
    # torch allocates can be, on GPUs as well.
    is_ordinary = buffer.untyped_storage().resizable()
    small_nbytes = _SMALL_NBYTES if buffer.device.type == "cpu" else _SMALL_NBYTES_ON_GPU
    slots = []
    for start, size, (name, parameter) in zip(starts, sizes, group, strict=True):
        tensor = _alias(buffer, start, parameter)
        slots.append(Slot(name, parameter, tensor, start, start + size, tensor.data_ptr()))
        slots[-1].may_lend = CAN_COUNT and is_ordinary and size > 0
        slots[-1].is_small = size * buffer.itemsize <= small_nbytes
    layout = Layout.of(((s.name, s.start, shape_in_memory(s.tensor)) for s in slots), dtype)
    bucket = Bucket(buffer, layout, num_footer, slots=slots)
    bucket.small = [slot for slot in slots if slot.is_small]
    for slot in slots:
        slot.weak_bucket = weakref.ref(bucket)
    bucket.find_runs()
    return bucket


def _alias(buffer: Tensor, start: int, parameter: nn.Parameter) -> Tensor:
    """Return a tensor in the buffer's memory with the parameter's shape and, if dense, its strides.

    It is not a view, so that `detach_` and `zero_grad` treat it like any gradient. Its storage
    covers this tensor alone: the use count of the storage tells whether a script keeps the tensor,
    and a script that saves it saves nothing else.
    """
    shape = parameter.shape
    strides = (
        parameter.stride() if is_dense(parameter) else torch.empty(shape, device="meta").stride()
    )
    if not parameter.numel():
        return torch.empty_strided(shape, strides, dtype=parameter.dtype, device=buffer.device)
    if parameter.dtype.is_complex:
        end = start + 2 * parameter.numel()
        values = torch.view_as_complex(buffer[start:end].view(-1, 2))
    else:
        values = buffer[start : start + parameter.numel()]
    # DLPack wraps the memory in a storage of its own; a view would share the buffer's.
    alias = from_dlpack(values)
    return alias.set_(alias.untyped_storage(), 0, shape, strides)


def shape_in_memory(slot: Tensor) -> tuple[int, ...]:
    """The slot's sizes in the order of its memory; complex numbers have a last dim of size 2."""
    dims = sorted(zip(slot.stride(), slot.shape, strict=True), key=lambda dim: -dim[0])
    return (*(size for _, size in dims), *((2,) if slot.is_complex() else ()))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dims."""
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


def elements_of(parameter: Tensor) -> Tensor:
    """The elements, (numel,), in the order of the memory; a view if the tensor is dense. Local."""
    values = parameter.detach()
    if not is_dense(values):
        values = values.contiguous()
    return values.as_strided((values.numel(),), (1,))
