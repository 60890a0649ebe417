"""Sums in stripes, encoded or not, for buffers shorter than the world."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchmn.comm.allreduce import ReduceBlock, create_allreduce
from torchmn.comm.codecs import CODECS, Float16, Layout, create_codec
from torchmn.errors import CommunicationError
from torchmn.testing import run_ranks


def test_owners_add_in_more_than_16_bits() -> None:
    """1 + 3 times 2^-11 in float16 is 1 if rounded at every addition."""

    def rank_main(comm):
        buffer = torch.full((5,), 1.0 if comm.rank == 0 else 2.0**-11)
        comm.route.sum_(buffer, create_allreduce(Float16()))
        return buffer.tolist()

    for result in run_ranks(rank_main, 4):
        assert result == [1.0 + 2.0**-10] * 5 or result == [1.0 + 2.0**-9] * 5


SHAPES = st.lists(
    st.sampled_from([(), (0,), (1,), (3,), (1500,), (40, 40), (7, 3, 5, 11), (2, 0, 3), (33, 65)]),
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@example(shapes=[()], codec="power_sgd", dtype=torch.float32, size=1, gap=0, num_exact=0)
@given(
    shapes=SHAPES,
    codec=st.sampled_from([name for name in CODECS if name != "float32"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    size=st.integers(1, 4),
    gap=st.integers(0, 5),
    num_exact=st.integers(0, 3),
)
def test_any_layout_travels(shapes, codec, dtype, size, gap, num_exact) -> None:
    """All ranks get the same bits, zeros stay zeros, losses are in the residual, twice in a row."""
    entries, start = [], 0
    for index, shape in enumerate(shapes):
        entries.append((f"p{index}", start, shape))
        start += math.prod(shape) + gap
    layout = Layout.of(entries, dtype)
    num_exact = 0 if dtype in (torch.float16, torch.bfloat16) else num_exact

    def rank_main(comm):
        own = create_codec(codec).new_instance()
        algorithm = create_allreduce(own)
        returned = torch.zeros(start, dtype=torch.float64)
        true = torch.zeros_like(returned)
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            values = torch.randn(start, generator=generator, dtype=torch.float64) / size
            buffer = torch.cat([values, torch.full((num_exact,), 0.5)]).to(dtype)
            true += sum(comm.allgather(buffer[:start].double()))
            block = ReduceBlock(buffer, layout, num_exact)
            end = partial(own.finish, is_valid=True)
            comm.engine.call(comm.route.sum_job(block, algorithm, on_complete=end))
            returned += buffer[:start].double()
            assert buffer[start:].tolist() == [0.5 * size] * num_exact
        zeros = torch.zeros(start + num_exact, dtype=dtype)
        create = create_allreduce(create_codec(codec).new_instance())
        comm.route.sum_(ReduceBlock(zeros, layout, num_exact), create)
        assert not zeros.any()
        residuals = comm.allgather_obj(own.state_dict().get("residuals", []))
        return buffer, returned, true, [entry for entries in residuals for entry in entries]

    results = run_ranks(rank_main, size)
    runs = {s.name: slice(s.start, s.end) for s in layout.segments}
    for buffer, returned, true, residuals in results:
        for name, run in runs.items():
            assert torch.equal(buffer[run], results[0][0][run])
            residual = torch.zeros_like(true[run])
            for entry in residuals:
                if entry["name"] == name:
                    first = entry["offset"]
                    residual[first : first + len(entry["values"])] += entry["values"].double()
            is_rounded = "16" in codec or dtype in (torch.float16, torch.bfloat16)
            error = (returned[run] + residual - true[run]).abs().max()
            assert error <= (0.05 if is_rounded else 1e-4)


def test_memory_that_is_not_contiguous_is_refused() -> None:
    def rank_main(comm):
        column = torch.ones(40_000, 2)[:, 0]
        comm.engine.call(lambda: comm.world.all_reduce_(column))

    with pytest.raises(CommunicationError, match=r"needs contiguous memory.* strides \(2,\)"):
        run_ranks(rank_main, 2)
