"""How gradients are laid out: buckets, slots, footers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.contracts.suites.communicator_contracts import seeded
from torchmn.comm.allreduce import create_allreduce
from torchmn.comm.streams import HostStreams
from torchmn.exchange.agreements.base import PassContext
from torchmn.exchange.bucket_set import BucketSet
from torchmn.exchange.buckets import plan_buckets
from torchmn.exchange.packing import Packing


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list:
    return [(f"p{i}", nn.Parameter(torch.zeros(s, dtype=dtype))) for i, s in enumerate(shapes)]


def plan(named, granularity="bucket", bucket_bytes=100, num_footer=2, **first):
    return plan_buckets(
        named, granularity=granularity, bucket_bytes=bucket_bytes, num_footer=num_footer, **first
    )


def names(buckets: list) -> list[list[str]]:
    return [[slot.name for slot in bucket.slots] for bucket in buckets]


def test_buckets_are_filled_from_the_last_parameter() -> None:
    buckets = plan(parameters((10,), (20,), (30,), (5,)))
    assert names(buckets) == [["p3", "p2"], ["p1", "p0"]]
    assert [b.index for b in buckets] == [0, 1]
    assert [b.exact.numel() for b in buckets] == [0, 2]


@pytest.mark.parametrize(
    ("bucket_bytes", "first_bytes", "expected"),
    [
        (400, None, [10, 5]),
        (400, 400, [10, 5]),
        (400, 1000, [10, 5]),
        (400, 40, [1, 2, 4, 8]),  # the last one has what is left
        (160, 40, [1, 2, 4, 4, 4]),
        (400, 60, [2, 3, 6, 4]),  # at least 60, 120, 240 and 400
        (40, 80, [1] * 15),
    ],
)
def test_the_first_bucket_is_small_and_each_of_the_next_ones_twice_as_large(
    bucket_bytes: int, first_bytes: int | None, expected: list[int]
) -> None:
    named = parameters(*[(10,)] * 15)
    buckets = plan(named, bucket_bytes=bucket_bytes, first_bytes=first_bytes)
    assert [len(bucket.slots) for bucket in buckets] == expected
    assert [name for own in names(buckets) for name in own] == [n for n, _ in reversed(named)]


def test_one_bucket_per_parameter_sorted_by_name() -> None:
    named = [("b", nn.Parameter(torch.zeros(2))), ("a", nn.Parameter(torch.zeros(3)))]
    assert names(plan(named, "parameter")) == [["a"], ["b"]]


def test_one_bucket_per_dtype() -> None:
    named = parameters((3,), (4,)) + [("d", nn.Parameter(torch.zeros(2, dtype=torch.float64)))]
    buckets = plan(named, "everything")
    assert names(buckets) == [["p0", "p1"], ["d"]]
    assert [b.buffer.dtype for b in buckets] == [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_footer_is_exact_with_16_bit_values(dtype: torch.dtype) -> None:
    buckets = plan(parameters((3,), dtype=dtype))
    assert [b.buffer.dtype for b in buckets] == [dtype, torch.float32]
    buckets[-1].exact[0] = 70_001.0
    assert float(buckets[-1].exact[0]) == 70_001.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float16])
def test_slots_are_in_the_buffer_without_overlap(dtype: torch.dtype) -> None:
    tensors = [
        torch.zeros(3, 4, dtype=dtype),
        torch.zeros((), dtype=dtype),
        torch.zeros(0, 2, dtype=dtype),
        torch.zeros(4, 3, dtype=dtype).t(),
        torch.zeros(2, 3, 2, 2, dtype=dtype).contiguous(memory_format=torch.channels_last),
        torch.zeros(4, 6, dtype=dtype)[:, ::2],
        torch.zeros(5, dtype=dtype).expand(3, 5),
        torch.zeros(1, 4, 1, dtype=dtype),
    ]
    named = [(f"p{i}", nn.Parameter(t)) for i, t in enumerate(tensors)]
    bucket = plan(named, "everything")[0]
    slots = [slot.tensor for slot in bucket.slots]
    for number, slot in enumerate(slots):
        slot.fill_(number + 1)
    for number, (slot, tensor) in enumerate(zip(slots, tensors, strict=True)):
        assert slot.shape == tensor.shape
        assert slot.dtype == tensor.dtype
        assert (slot == number + 1).all()
        first = bucket.buffer.data_ptr()
        assert first <= slot.data_ptr() < first + bucket.buffer.nbytes or not slot.numel()
        assert slot.untyped_storage().nbytes() == slot.nbytes or not slot.numel()
    for index in (0, 3, 4):  # dense: as the parameter is stored
        assert slots[index].stride() == tensors[index].stride()
    assert slots[5].is_contiguous()
    assert not bucket.exact.any()


class OneRank:
    """What a `BucketSet` needs of a communicator to be filled."""

    rank, size, rank_label = 0, 1, "rank 0"
    route = SimpleNamespace(overlaps_backward=False)
    engine = SimpleNamespace(device=torch.device("cpu"), streams=HostStreams())


def bucket_set(named) -> BucketSet:
    return BucketSet(OneRank(), create_allreduce(None), plan(named, "everything", num_footer=9))


def packing(buckets: BucketSet, weight: float) -> Packing:
    context = PassContext(step=0, weight=weight, num_samples=0, is_active=True)
    return Packing(buckets, context, 1.0)


def test_pack_writes_scaled_gradients_and_notices_accumulation() -> None:
    named = parameters((3,), (2,), (2,))
    first, second, third = (p for _, p in named)
    first.grad = torch.tensor([1.0, 2.0, 3.0])
    buckets = bucket_set(named)
    packed = packing(buckets, 0.5)
    slots = [buckets.slot_of[p] for p in (first, second, third)]
    slots[1].tensor.fill_(7.0)
    packed.pack(buckets.buckets[0], slots)
    assert slots[0].tensor.tolist() == [0.5, 1.0, 1.5]
    assert slots[1].tensor.tolist() == [0.0, 0.0]
    assert [slot.has_gradient for slot in slots[:2]] == [True, False]
    assert not packed.is_accumulating
    first.grad = slots[0].tensor
    packed = packing(buckets, 2.0)
    packed.pack(buckets.buckets[0], slots)
    assert first.grad.tolist() == [1.0, 2.0, 3.0]
    assert packed.is_accumulating


def test_a_gradient_of_weight_zero_is_zeros_even_if_it_is_nan() -> None:
    named = parameters((2,))
    named[0][1].grad = torch.tensor([float("nan"), 1.0])
    buckets = bucket_set(named)
    packing(buckets, 0.0).pack(buckets.buckets[0], buckets.slots)
    assert buckets.slots[0].tensor.tolist() == [0.0, 0.0]


def test_gradients_of_other_strides_are_packed_by_index() -> None:
    parameter = nn.Parameter(torch.zeros(3, 4).t())
    parameter.grad = seeded(0, 4, 3, dtype=torch.float32).contiguous()
    buckets = bucket_set([("w", parameter)])
    packing(buckets, 1.0).pack(buckets.buckets[0], buckets.slots)
    assert torch.equal(buckets.slots[0].tensor, seeded(0, 4, 3, dtype=torch.float32))
