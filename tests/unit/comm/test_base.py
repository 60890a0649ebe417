"""What the collectives refuse, on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.limits import limit
from tests.unit.comm.ranks import one_stays_away
from torchmn.comm import Communicator
from torchmn.errors import (
    CommunicationError,
    RankMismatchError,
    TimeLimitError,
    TorchmnError,
    UnknownNameError,
    UsageError,
)
from torchmn.testing import run_ranks


def errors_of(call: Callable[[Communicator], object], world_size: int = 3) -> list:
    """What every rank raises; all must be able to continue together."""

    def rank_main(comm):
        try:
            call(comm)
        except (TorchmnError, TypeError) as error:
            caught = error
        else:
            caught = None
        comm.barrier()
        return caught

    return run_ranks(rank_main, world_size, timeout_s=limit(5))


def model_of(*shapes: tuple[str, list[int]], dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Module()
    for name, shape in shapes:
        model.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=dtype)))
    return model


def with_gradients(*names: str) -> nn.Module:
    model = model_of(("a", [2]), ("b", [3]))
    for name in names:
        model.get_parameter(name).grad = torch.ones_like(model.get_parameter(name))
    return model


ONE, FOUR = torch.ones(1), torch.ones(4)
# That they are noticed is a contract (call_contracts); these are what messages have to say.
DIFFERENT: dict[str, tuple[Callable, str]] = {
    "allreduce of other shapes": (
        lambda comm, odd: comm.allreduce(torch.ones(3) if odd else FOUR),
        "ranks 0, 2: allreduce(op=sum, tensor=float32[4]); "
        "rank 1: allreduce(op=sum, tensor=float32[3])",
    ),
    "reduce_scatter of other shapes": (
        lambda comm, odd: comm.reduce_scatter([ONE, ONE, FOUR if odd else ONE]),
        "part 2 of reduce_scatter(op=sum): ranks 0, 2: float32[1]; rank 1: float32[4]",
    ),
    "models with more parameters": (
        lambda comm, odd: comm.bcast_data(
            model_of(("a", [2]), ("b", [2])) if odd else model_of(("a", [2]))
        ),
        "part 1 of bcast_data(): ranks 0, 2: missing; rank 1: 'b' float32[2]",
    ),
    "gradients of other parameters": (
        lambda comm, odd: comm.multi_node_mean_grad(with_gradients("b" if odd else "a")),
        "part 0 of multi_node_mean_grad(): ranks 0, 2: 'a' float32[2]; rank 1: 'b' float32[3]",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_calls_raise_with_both_versions_on_all_ranks(case: str) -> None:
    call, text = DIFFERENT[case]
    for rank, error in enumerate(errors_of(lambda comm: call(comm, comm.rank == 1))):
        assert isinstance(error, RankMismatchError)
        assert str(error).startswith(f"rank {rank} of 3 on localhost")
        assert text in str(error)
        assert "All ranks must make the same calls with the same arguments" in str(error)


def test_differences_are_found_before_anything_is_written() -> None:
    def rank_main(comm):
        model = model_of(("a", [2]), ("b", [2]))
        with torch.no_grad():
            model.a.fill_(comm.rank)
        model = model if comm.rank else model_of(("a", [2]), ("b", [3]))
        with pytest.raises(RankMismatchError):
            comm.bcast_data(model)
        assert comm.rank == 0 or (model.a == comm.rank).all()

    run_ranks(rank_main, 2)


WRONG: dict[str, tuple[Callable, str]] = {
    "unknown op": (lambda comm: comm.allreduce(ONE, "summ"), "sum, mean, product, max, min"),
    "a mean of integers": (
        lambda comm: comm.allreduce(ONE.long(), "mean"),
        "A mean of torch.int64 is not supported. Use op='sum' or .float().",
    ),
    "a factor that is no number": (
        lambda comm: comm.allreduce(ONE, prescale_factor=float("nan")),
        "prescale_factor=nan must be a finite number.",
    ),
    "the largest of complex numbers": (
        lambda comm: comm.allreduce(ONE.to(torch.complex64), "max"),
        "op='max' of torch.complex64 does not exist",
    ),
    "a root that is no rank": (
        lambda comm: comm.bcast(ONE, root=comm.size),
        "root=3 must be a rank from 0 to 2",
    ),
    "nothing to gather": (
        lambda comm: comm.allgather(None),
        "allgather needs a tensor, got None. For objects use the _obj methods.",
    ),
    "too few parts": (lambda comm: comm.scatter([ONE] * 2, root=1), "scatter needs 3 parts, got 2"),
    "no parts at the root": (
        lambda comm: comm.scatter(None, root=1),
        "scatter needs 3 parts, got None",
    ),
    "a tensor with too few rows": (
        lambda comm: comm.reduce_scatter(torch.ones(2, 4)),
        "reduce_scatter needs 3 parts, got 2",
    ),
    "a nested tensor": (
        lambda comm: comm.allreduce(nested()),
        "allreduce needs a dense tensor, got a nested one",
    ),
    "a color that is no integer": (
        lambda comm: comm.split("red", 0),
        "'str' object cannot be interpreted as an integer",
    ),
    "a subgroup without ranks": (
        lambda comm: comm.subgroup([]),
        "ranks=[]. Give at least one rank, each once, from 0 to 2.",
    ),
    "a model with a sparse buffer": (
        lambda comm: comm.bcast_data(with_sparse_buffer()),
        "bcast_data of 'odd' needs a dense tensor",
    ),
}
OTHER_KINDS = {"unknown op": UnknownNameError, "a color that is no integer": TypeError}


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that its interface may change
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def with_sparse_buffer() -> nn.Module:
    model = nn.Module()
    model.register_buffer("odd", torch.eye(2).to_sparse())
    return model


@pytest.mark.parametrize("case", WRONG)
def test_an_invalid_argument_on_one_rank_raises_on_all(case: str) -> None:
    call, text = WRONG[case]
    first, second, third = errors_of(
        lambda comm: call(comm) if comm.rank == 1 else comm.allreduce(FOUR)
    )
    assert isinstance(second, OTHER_KINDS.get(case, UsageError))
    assert text in str(second)
    for error in (first, third):
        assert isinstance(error, RankMismatchError)
        assert "is in allreduce(op=sum, tensor=float32[4]), but rank 1 rejected it: " in str(error)
        assert text in str(error)


def test_only_the_root_must_have_a_tensor_to_broadcast() -> None:
    first, second, third = errors_of(lambda comm: comm.bcast(None, root=1))
    assert isinstance(second, UsageError)
    assert "bcast needs a tensor, got None" in str(second)
    for error in (first, third):
        assert "is in bcast(root=1), but rank 1 rejected it: bcast needs a tensor" in str(error)

    def rank_main(comm):
        return comm.bcast(ONE if comm.rank == 1 else None, root=1)

    assert run_ranks(rank_main, 3) == [ONE] * 3


def test_an_invalid_argument_is_named_if_the_other_ranks_do_not_arrive() -> None:
    with pytest.raises(TimeLimitError, match="rejected its own call: Unknown reduction"):
        one_stays_away(lambda comm: comm.allreduce(ONE, "summ"))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c: c.send(ONE, c.rank), "other than this one"),
        (lambda c: c.recv(7), "source=7 must be a rank from 0 to 1 other than this one"),
        (lambda c: c.send(ONE, 1 - c.rank, tag=-1), r"tag=-1 must be an integer from 0"),
        (lambda c: c.recv(1 - c.rank, tag=-2), r"tag=-2 .* or ANY_TAG"),
        (lambda c: c.send(None, 1 - c.rank), "send needs a tensor, got None"),
    ],
)
def test_bad_arguments_of_messages(call: Callable, text: str) -> None:
    """They concern two ranks, so no other rank raises."""

    def rank_main(comm):
        with pytest.raises(UsageError, match=text):
            call(comm)

    run_ranks(rank_main, 2)


def test_results_share_no_memory_with_arguments() -> None:
    """Neither memory nor a graph: on other ranks there is none, and so backward refuses them."""

    def rank_main(comm):
        x = torch.full((2,), float(comm.rank), requires_grad=True) * 1
        results = [
            comm.allgather(x)[comm.rank],
            comm.gather(x, comm.rank)[comm.rank] if comm.size == 1 else comm.allreduce(x, "max"),
            comm.alltoall([x] * comm.size)[comm.rank],
            comm.reduce_scatter([x] * comm.size),
        ]
        scattered = comm.scatter([x] * comm.size if comm.rank == 0 else None)
        results += [scattered] if comm.rank == 0 else []  # the other rank has given nothing
        gathered = comm.gather(x, 0)
        results += [gathered[0]] if gathered else []
        for result in results:
            with pytest.raises(UsageError, match=r"torchmn\.functions"):
                result.sum().backward()
            assert result.data_ptr() != x.data_ptr()

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


def test_use_after_finalize_raises() -> None:
    def rank_main(comm):
        comm.barrier()
        comm.finalize()
        comm.finalize()
        for call in (comm.barrier, lambda: comm.allgather_obj(1), lambda: comm.split(0, 0)):
            with pytest.raises(CommunicationError, match="was finalized. Create a new one"):
                call()

    run_ranks(rank_main, 2)


def test_a_split_is_finalized_by_itself() -> None:
    def rank_main(comm):
        part = comm.split(comm.rank // 2, comm.rank)
        assert [r % 2 for r in part.allgather_obj(comm.rank)] == list(range(part.size))
        nested = part.split(0, -part.rank)
        assert nested.allgather_obj(comm.rank) == list(reversed(part.allgather_obj(comm.rank)))
        nested.finalize()
        part.finalize()
        assert comm.allgather_obj(comm.rank) == list(range(comm.size))

    run_ranks(rank_main, 4, name="hierarchical")
