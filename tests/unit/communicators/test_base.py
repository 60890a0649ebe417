"""What the collectives refuse, and that all ranks learn it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchmn.communicators import Communicator
from torchmn.errors import (
    CommunicationError,
    DisagreementError,
    TorchmnError,
    UnknownNameError,
    UsageError,
)
from torchmn.testing import run_ranks


def errors_of(call: Callable[[Communicator], object], world_size: int = 3) -> list:
    """What every rank raises; all must be able to go on together."""

    def rank_main(comm):
        try:
            call(comm)
        except TorchmnError as error:
            caught = error
        else:
            caught = None
        comm.barrier()
        return caught

    return run_ranks(rank_main, world_size, timeout_s=5)


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        (
            lambda rank: (torch.ones(3 if rank == 1 else 4), "sum"),
            "rank 1: sum of torch.float32[3]",
        ),
        (
            lambda rank: (torch.ones(4, dtype=torch.float64 if rank else torch.float32), "sum"),
            "rank 2: sum of torch.float64[4]",
        ),
        (lambda rank: (torch.ones(4), "max" if rank else "sum"), "rank 1: max of torch.float32[4]"),
        (lambda rank: (torch.ones([2, 2] if rank else [4]), "sum"), "torch.float32[2, 2]"),
    ],
)
def test_allreduce_of_different_things(differs: Callable, said: str) -> None:
    for rank, error in enumerate(errors_of(lambda comm: comm.allreduce(*differs(comm.rank)))):
        assert isinstance(error, DisagreementError)
        assert str(error).startswith(f"rank {rank} of 3")
        assert said in str(error)
        assert "All ranks must give the same shape, dtype and op." in str(error)


LENGTHS = {
    "alltoall": lambda comm, wrong: comm.alltoall([torch.ones(1)] * (5 if wrong else comm.size)),
    "scatter": lambda comm, wrong: comm.scatter(
        [torch.ones(1)] * 2 if comm.rank == 1 else None, root=1
    ),
    "scatter of nothing": lambda comm, wrong: comm.scatter(None, root=1),
    "reduce_scatter": lambda comm, wrong: comm.reduce_scatter(
        torch.ones(2 if wrong else comm.size, 4)
    ),
    "reduce_scatter of nothing": lambda comm, wrong: comm.reduce_scatter(
        [] if wrong else torch.ones(comm.size, 4)
    ),
}


@pytest.mark.parametrize("way", LENGTHS)
def test_a_wrong_number_of_parts_is_told_to_all(way: str) -> None:
    first, second, third = errors_of(lambda comm: LENGTHS[way](comm, comm.rank == 1))
    assert isinstance(second, UsageError)
    assert "rank 1 of 3" in str(second)
    assert "needs 3 parts, got" in str(second)
    for error in (first, third):
        assert isinstance(error, DisagreementError)
        assert "rank 1 refused it" in str(error)


def test_reduce_scatter_of_different_shapes() -> None:
    def call(comm):
        comm.reduce_scatter([torch.ones(2 if comm.rank == 1 else 3)] * comm.size)

    for error in errors_of(call):
        assert isinstance(error, DisagreementError)
        assert "shapes [(2,), (3,)]" in str(error)


def test_ranks_in_different_collectives_learn_it() -> None:
    def call(comm):
        if comm.rank == 1:
            comm.alltoall([torch.ones(1)] * comm.size)
        else:
            comm.allgather_obj(1)

    first, second, third = errors_of(call)
    for error in (first, third):
        assert "is in 'allgather', but rank 1 is in 'alltoall'" in str(error)
    assert "rank 1 of 3 on localhost" in str(second)
    assert "is in 'alltoall', but rank" in str(second)
    assert all(isinstance(error, DisagreementError) for error in (first, second, third))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c: c.allreduce(torch.ones(1), "product"), UnknownNameError, "sum, mean, max, min"),
        (
            lambda c: c.allreduce(torch.ones(1).long(), "mean"),
            UsageError,
            r"op='sum' or .float\(\)",
        ),
        (lambda c: c.bcast(torch.ones(1), root=2), UsageError, r"root=2 is outside 0\.\.1"),
        (lambda c: c.gather_obj(1, root=-1), UsageError, r"root=-1 is outside 0\.\.1"),
        (lambda c: c.send(torch.ones(1), c.rank), UsageError, "other than this one"),
        (lambda c: c.recv(7), UsageError, "source=7: a rank of 2 other than this one"),
    ],
)
def test_bad_arguments(call: Callable, error: type, text: str) -> None:
    def rank_main(comm):
        with pytest.raises(error, match=text):
            call(comm)

    run_ranks(rank_main, 2)


def test_results_share_nothing_with_what_was_given() -> None:
    """Neither memory nor a graph: on other ranks there is none."""

    def rank_main(comm):
        x = torch.full((2,), float(comm.rank), requires_grad=True) * 1
        results = [
            comm.allgather(x)[comm.rank],
            comm.gather(x, comm.rank)[comm.rank] if comm.size == 1 else comm.allreduce(x, "max"),
            comm.alltoall([x] * comm.size)[comm.rank],
            comm.scatter([x] * comm.size if comm.rank == 0 else None),
            comm.reduce_scatter([x] * comm.size),
        ]
        gathered = comm.gather(x, 0)
        results += [gathered[0]] if gathered else []
        for result in results:
            assert not result.requires_grad
            assert result.data_ptr() != x.data_ptr()
        assert not comm.bcast(x, 0).requires_grad

    run_ranks(rank_main, 1)
    run_ranks(rank_main, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reduce_scatter_of_16_bits_rounds_once(dtype: torch.dtype) -> None:
    def rank_main(comm):
        value = 1.0 if comm.rank == 0 else torch.finfo(dtype).eps / 2
        return comm.reduce_scatter(torch.full((comm.size, 1), value, dtype=dtype))

    for result in run_ranks(rank_main, 3):
        assert result.dtype == dtype
        assert float(result) == 1.0 + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32, torch.float16])
@pytest.mark.parametrize("codec", [None, "float16"])
def test_mean_grad_of_every_dtype_and_memory_format(dtype: torch.dtype, codec: str | None) -> None:
    def rank_main(comm):
        shape = (2, 3, 2, 2)
        weight = nn.Parameter(torch.ones(shape, dtype=dtype))
        value = complex(1, 2) if dtype.is_complex else 1.0
        weight.grad = torch.full(shape, value * (comm.rank + 1), dtype=dtype)
        weight.grad = weight.grad.contiguous(memory_format=torch.channels_last)
        comm.multi_node_mean_grad(nn.ParameterList([weight]))
        assert weight.grad.is_contiguous(memory_format=torch.channels_last)
        assert torch.allclose(weight.grad, torch.full(shape, value * 2, dtype=dtype), rtol=2e-3)

    run_ranks(rank_main, 3, allreduce_grad_dtype=codec)


def test_use_after_finalize_is_a_sentence() -> None:
    def rank_main(comm):
        comm.barrier()
        comm.finalize()
        comm.finalize()
        for call in (comm.barrier, lambda: comm.allgather_obj(1), lambda: comm.split(0, 0)):
            with pytest.raises(CommunicationError, match="was finalized; create a new one"):
                call()

    run_ranks(rank_main, 2)


def test_a_split_lives_and_ends_by_itself() -> None:
    def rank_main(comm):
        part = comm.split(comm.rank // 2, comm.rank)
        assert [r % 2 for r in part.allgather_obj(comm.rank)] == list(range(part.size))
        nested = part.split(0, -part.rank)
        assert nested.allgather_obj(comm.rank) == list(reversed(part.allgather_obj(comm.rank)))
        nested.finalize()
        part.finalize()
        assert comm.allgather_obj(comm.rank) == list(range(comm.size))

    run_ranks(rank_main, 4, name="hierarchical")
