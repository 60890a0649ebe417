"""Sums in stripes, encoded or not, for buffers shorter than the world."""

from __future__ import annotations

import pytest
import torch

from torchmn.communicators.wire import StripedWire, create_wire
from torchmn.compression import Float16, create_codec
from torchmn.testing import run_ranks


@pytest.mark.parametrize("codec", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("num_exact", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_short_buffers(codec: str | None, numel: int, num_exact: int, dtype: torch.dtype) -> None:
    num_exact = min(num_exact, numel)

    def rank_main(comm):
        buffer = torch.full((numel,), comm.rank + 1.0, dtype=dtype)
        if num_exact:
            buffer[-num_exact:] = comm.rank + 1 + 2.0**-20  # lost in 16 bits
        comm.sum_(buffer, wire=StripedWire(create_codec(codec)), num_exact=num_exact)
        return buffer

    for result in run_ranks(rank_main, 4):
        assert result[: numel - num_exact].tolist() == [10.0] * (numel - num_exact)
        assert result[numel - num_exact :].tolist() == [10 + 4 * 2.0**-20] * num_exact


def test_owners_add_in_more_than_16_bits() -> None:
    """1 + 3 times 2^-11 in float16 is 1 if rounded at every addition."""

    def rank_main(comm):
        buffer = torch.full((5,), 1.0 if comm.rank == 0 else 2.0**-11)
        comm.sum_(buffer, wire=create_wire(Float16()))
        return buffer.tolist()

    for result in run_ranks(rank_main, 4):
        assert result == [1.0 + 2.0**-10] * 5 or result == [1.0 + 2.0**-9] * 5
