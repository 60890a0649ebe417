"""How buckets are cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmn.gradients.chunks import cut_into_chunks

from torchmn.compression import create_codec
from torchmn.gradients.buckets import plan_buckets
from torchmn.units import KiB


def buckets(*numels: int, bucket_bytes: int = 1 << 20, dtype: torch.dtype = torch.float32):
    named = [(f"p{i}", nn.Parameter(torch.zeros(n, 1, dtype=dtype))) for i, n in enumerate(numels)]
    return plan_buckets(
        named, granularity="bucket", bucket_bytes=bucket_bytes, num_footer=3, has_own_footer=True
    )


def test_without_a_size_a_chunk_is_a_bucket() -> None:
    made = buckets(10_000, 300_000, 5)
    chunks = cut_into_chunks(made, None, None)
    assert [chunk.cargo for chunk in chunks] == [bucket.cargo for bucket in made]
    assert [chunk.index for chunk in chunks] == [0, 1, 2]
    assert chunks[-1].is_full  # the footer has no parameter


def test_chunks_are_smaller_towards_the_first_parameters() -> None:
    chunks = cut_into_chunks(buckets(1_000_000), 1024 * KiB, None)
    sizes = [chunk.cargo.buffer.nbytes // KiB for chunk in chunks[:-1]]
    assert sizes[-3:] == pytest.approx([512, 256, 128], abs=8)
    assert all(size <= 1024 + 8 for size in sizes)


@pytest.mark.parametrize("codec", [None, "float16", "int8", "1bit", "power_sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_element_travels_once(codec: str | None, dtype: torch.dtype) -> None:
    made = buckets(0, 70_001, 3, 0, 150_000, 7, 0, bucket_bytes=400_000, dtype=dtype)
    chunks = cut_into_chunks(made, 64 * KiB, create_codec(codec) if codec else None)
    assert len(chunks) > len(made) or codec == "power_sgd"
    for chunk in chunks:
        chunk.cargo.buffer.add_(1)
        assert chunk.cargo.layout.end <= chunk.cargo.buffer.numel()
    assert all((bucket.buffer == 1).all() for bucket in made)
    assert sum(c.cargo.layout.numel for c in chunks) == sum(b.cargo.layout.numel for b in made)
    assert chunks[-1].cargo.num_exact == 3
    assert not any(chunk.cargo.num_exact for chunk in chunks[:-1])
    for bucket in made:
        for parameter in bucket.parameters:
            holders = [c for c in chunks if any(p is parameter for p in c.parameters)]
            assert holders or not parameter.numel()


@pytest.mark.parametrize("codec", ["int8", "1bit"])
def test_cuts_are_where_blocks_begin(codec: str) -> None:
    made = create_codec(codec)
    for chunk in cut_into_chunks(buckets(500_001), 64 * KiB, made)[:-1]:
        for segment in chunk.cargo.layout.segments:
            assert segment.offset % made.block_length == 0


def test_power_sgd_gets_whole_parameters() -> None:
    chunks = cut_into_chunks(buckets(100_000, 200_000, 50), 64 * KiB, create_codec("power_sgd"))
    assert all(segment.is_whole for chunk in chunks for segment in chunk.cargo.layout.segments)
    assert len(chunks) == 3  # the tiny one goes with its neighbour, then the footer


def test_a_footer_that_ends_a_bucket_ends_the_last_chunk() -> None:
    named = [("w", nn.Parameter(torch.zeros(500, 300)))]
    made = plan_buckets(named, granularity="bucket", bucket_bytes=1 << 20, num_footer=3)
    chunks = cut_into_chunks(made, 64 * KiB, None)
    assert [chunk.cargo.num_exact for chunk in chunks[-2:]] == [0, 3]
    assert chunks[-1].cargo.exact.data_ptr() == made[0].footer.data_ptr()
