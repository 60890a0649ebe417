"""How gradients are laid out: buckets, slots, footers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.contracts.suites.communicator_contracts import seeded
from torchmn.gradients.buckets import plan_buckets


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list:
    return [(f"p{i}", nn.Parameter(torch.zeros(s, dtype=dtype))) for i, s in enumerate(shapes)]


def plan(named, granularity="bucket", bucket_bytes=100, num_footer=2):
    return plan_buckets(
        named, granularity=granularity, bucket_bytes=bucket_bytes, num_footer=num_footer
    )


def test_buckets_are_filled_from_the_last_parameter() -> None:
    buckets = plan(parameters((10,), (20,), (30,), (5,)))
    assert [b.names for b in buckets] == [["p3", "p2"], ["p1", "p0"]]
    assert [b.index for b in buckets] == [0, 1]
    assert [b.footer.numel() for b in buckets] == [0, 2]


def test_one_bucket_per_parameter_sorted_by_name() -> None:
    named = [("b", nn.Parameter(torch.zeros(2))), ("a", nn.Parameter(torch.zeros(3)))]
    assert [b.names for b in plan(named, "parameter")] == [["a"], ["b"]]


def test_one_bucket_per_dtype() -> None:
    named = parameters((3,), (4,)) + [("d", nn.Parameter(torch.zeros(2, dtype=torch.float64)))]
    buckets = plan(named, "everything")
    assert [(b.names, b.buffer.dtype) for b in buckets] == [
        (["p0", "p1"], torch.float32),
        (["d"], torch.float64),
    ]


def test_nothing_to_lay_out() -> None:
    assert plan([]) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_footer_counts_exactly_beside_16_bits(dtype: torch.dtype) -> None:
    buckets = plan(parameters((3,), dtype=dtype))
    assert [b.buffer.dtype for b in buckets] == [dtype, torch.float32]
    buckets[-1].footer[0] = 70_001.0
    assert float(buckets[-1].footer[0]) == 70_001.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float16])
def test_slots_lie_in_the_buffer_without_overlap(dtype: torch.dtype) -> None:
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
    for number, slot in enumerate(bucket.slots):
        slot.fill_(number + 1)
    for number, (slot, tensor) in enumerate(zip(bucket.slots, tensors, strict=True)):
        assert slot.shape == tensor.shape
        assert slot.dtype == tensor.dtype
        assert (slot == number + 1).all()
        assert slot.untyped_storage().data_ptr() == bucket.buffer.untyped_storage().data_ptr()
    for index in (0, 3, 4):  # dense: as the parameter lies
        assert bucket.slots[index].stride() == tensors[index].stride()
    assert bucket.slots[5].is_contiguous()
    assert not bucket.footer.any()


def test_pack_writes_scaled_gradients_and_says_what_was_there() -> None:
    named = parameters((3,), (2,), (2,))
    bucket = plan(named, "everything")[0]
    first, second, third = (p for _, p in named)
    first.grad = torch.tensor([1.0, 2.0, 3.0])
    assert bucket.pack(0, 0.5) is False
    assert bucket.slots[0].tolist() == [0.5, 1.0, 1.5]
    bucket.slots[1].fill_(7.0)
    assert bucket.pack(1, 0.5) is False
    assert bucket.slots[1].tolist() == [0.0, 0.0]
    third.grad = torch.tensor([float("nan"), 1.0])
    bucket.pack(2, 0.0)
    assert bucket.slots[2].tolist() == [0.0, 0.0]
    bucket.expose()
    assert first.grad is bucket.slots[0]
    first.grad += 1
    assert bucket.pack(0, 2.0) is True
    assert first.grad.tolist() == [3.0, 4.0, 5.0]


def test_gradients_of_other_strides_are_packed_by_index() -> None:
    parameter = nn.Parameter(torch.zeros(3, 4).t())
    bucket = plan([("w", parameter)], "everything")[0]
    parameter.grad = seeded(0, 4, 3, dtype=torch.float32).contiguous()
    bucket.pack(0, 1.0)
    assert torch.equal(bucket.slots[0], seeded(0, 4, 3, dtype=torch.float32))


def test_slots_behave_as_gradients() -> None:
    """What optimizers and users do with ``p.grad`` in place."""
    for dtype in (torch.float32, torch.complex64):
        parameter = nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = torch.optim.SGD([parameter], 0.1)
        bucket = plan([("w", parameter)], "everything")[0]
        bucket.expose()
        optimizer.zero_grad(set_to_none=False)
        parameter.grad.detach_()
        parameter.grad.mul_(2)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        (parameter * parameter).real.sum().backward()
        assert parameter.grad is bucket.slots[0]
        optimizer.step()
        assert parameter.detach().real.tolist() == pytest.approx([0.8] * 3)
