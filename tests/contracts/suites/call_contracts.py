"""What the calls of a communicator must do beyond their results: compare, refuse, start, deliver.

Each function takes a communicator, is called on every rank, and raises `ContractError` where the
contract is broken. After every one of them the ranks are still together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.contracts.suites.communicator_contracts import (
    ContractError,
    contracts_in,
    require,
    seeded,
)
from tests.limits import limit
from torchmn.comm import ANY_SOURCE, ANY_TAG, Communicator, Status
from torchmn.errors import RankMismatchError, UsageError


def _different_calls() -> dict[str, Callable[[Communicator, bool], object]]:
    """By name: a call, and whether this rank makes it in another way than the others."""
    one = torch.ones(1)
    long = torch.ones(100_000)
    return {
        "shape of allreduce": lambda c, odd: c.allreduce(torch.ones(2 + odd)),
        "dtype of allreduce": lambda c, odd: c.allreduce(long.double() if odd else long),
        "op of allreduce": lambda c, odd: c.allreduce(long, "max" if odd else "sum"),
        "factor of allreduce": lambda c, odd: c.allreduce(one, postscale_factor=1.0 + odd),
        "op of reduce_scatter": lambda c, odd: c.reduce_scatter(
            [one] * c.size, "mean" if odd else "sum"
        ),
        "dtype of reduce_scatter": lambda c, odd: c.reduce_scatter(
            [one.double() if odd else one] * c.size
        ),
        "root of bcast": lambda c, odd: c.bcast(one, root=int(odd)),
        "root of bcast_obj": lambda c, odd: c.bcast_obj("x", root=int(odd)),
        "root of gather": lambda c, odd: c.gather(one, root=int(odd)),
        "root of scatter": lambda c, odd: c.scatter([one] * c.size, root=int(odd)),
        "root of scatter_obj": lambda c, odd: c.scatter_obj([1] * c.size, root=int(odd)),
        "collective": lambda c, odd: c.allgather_obj(1) if odd else c.alltoall([one] * c.size),
        "barrier": lambda c, odd: c.barrier() if odd else c.allgather(one),
        "ranks of subgroup": lambda c, odd: c.subgroup([int(odd)]),
        "shape in bcast_data": lambda c, odd: c.bcast_data(nn.Linear(2, 3 + odd)),
        "dtype in bcast_data": lambda c, odd: c.bcast_data(
            nn.Linear(2, 3, dtype=torch.float64 if odd else torch.float32)
        ),
    }


def check_mismatch(comm: Communicator) -> None:
    """A call that one rank makes in another way is a RankMismatchError on all, nothing else."""
    if comm.size == 1:
        return
    is_odd = comm.rank == comm.size - 1
    for what, call in _different_calls().items():
        error = _error_of(lambda call=call: call(comm, is_odd))  # type: ignore[misc]
        require(isinstance(error, RankMismatchError), f"another {what}: {error!r}")
        require(f"rank {comm.size - 1}: " in str(error), f"another {what}: the message is {error}")
    _check_together(comm)


def check_rejection(comm: Communicator) -> None:
    """An argument that is wrong on one rank is a UsageError there and a mismatch on all others."""
    is_odd = comm.rank == comm.size - 1
    calls: dict[str, Callable[[], object]] = {
        "op": lambda: comm.allreduce(torch.ones(1), "other" if is_odd else "sum"),  # type: ignore[arg-type]
        "mean of integers": lambda: comm.allreduce(
            torch.ones(1, dtype=torch.int64 if is_odd else torch.float32), "mean"
        ),
        "root": lambda: comm.bcast(torch.ones(1), root=comm.size if is_odd else 0),
        "tensor": lambda: comm.allgather(None if is_odd else torch.ones(1)),  # type: ignore[arg-type]
        "parts": lambda: comm.alltoall([torch.ones(1)] * (comm.size + is_odd)),
    }
    for what, call in calls.items():
        error = _error_of(call)
        if is_odd:
            require(isinstance(error, UsageError), f"a wrong {what}: {error!r}")
        else:
            require(isinstance(error, RankMismatchError), f"a wrong {what} elsewhere: {error!r}")
            text = f"rank {comm.size - 1} rejected it"
            require(text in str(error), f"a wrong {what} elsewhere: the message is {error}")
    _check_together(comm)


def check_handles(comm: Communicator) -> None:
    """Started collectives give what the blocking ones give, whatever the order of waiting."""
    x, size = seeded(comm.rank, 5), comm.size
    all_ranks = [seeded(rank, 5) for rank in range(size)]
    parts = [seeded(comm.rank, 4, salt=peer) for peer in range(size)]
    large = seeded(comm.rank, 40_003)
    given = x.clone()
    are_started = threading.Event()  # whatever the threads do, none is made before all are started
    comm.engine.submit(lambda: are_started.wait(limit(10)))
    handles = [
        comm.start_allreduce(large, "max"),
        comm.start_allreduce(given),
        comm.start_bcast(given, root=size - 1),
        comm.start_reduce_scatter(parts),
    ]
    tuples = [comm.start_allgather(given), comm.start_alltoall(parts)]
    given.zero_()  # it was copied when the collective was started
    are_started.set()
    blocking = comm.allreduce(x, "min")
    expected = [
        torch.stack([seeded(rank, 40_003) for rank in range(size)]).amax(0),
        torch.stack(all_ranks).sum(0),
        all_ranks[-1],
        torch.stack([seeded(rank, 4, salt=comm.rank) for rank in range(size)]).sum(0),
    ]
    expected_tuples = [all_ranks, [seeded(rank, 4, salt=comm.rank) for rank in range(size)]]
    for index in reversed(range(len(handles))):
        _near(handles[index].wait(), expected[index], f"started collective {index}")
        require(handles[index].done, "a handle is done after wait")
    for handle, them in zip(tuples, expected_tuples, strict=True):
        for got, one in zip(handle.wait(), them, strict=True):
            _near(got, one, "a started allgather")
    _near(blocking, torch.stack(all_ranks).amin(0), "a blocking call after started ones")


def check_scaling(comm: Communicator) -> None:
    """Products, and factors before and after a reduction, for few bytes and for many."""
    for numel in (3, 40_003):
        all_ranks = torch.stack([seeded(rank, numel) / 10 for rank in range(comm.size)])
        x = all_ranks[comm.rank]
        _near(comm.allreduce(x, "product"), all_ranks.prod(0), "a product")
        _near(
            comm.allreduce(x, "sum", prescale_factor=0.5, postscale_factor=3.0),
            all_ranks.sum(0) * 1.5,
            "a scaled sum",
        )
        _near(
            comm.allreduce(x, "max", prescale_factor=-1.0, postscale_factor=2.0),
            -2 * all_ranks.amin(0),
            "a maximum of what was scaled before",
        )
        parts = [x * (peer + 1) for peer in range(comm.size)]
        _near(
            comm.reduce_scatter(parts, "mean", prescale_factor=2.0, postscale_factor=0.25),
            all_ranks.mean(0) * (comm.rank + 1) / 2,
            "a scaled part",
        )
        _near(
            comm.reduce_scatter(parts, "product"),
            (all_ranks * (comm.rank + 1)).prod(0),
            "a product of parts",
        )
    for dtype in (torch.float16, torch.bfloat16):
        third = torch.full((1,), 1 / 3, dtype=dtype)
        exact = (third.float() ** comm.size).to(dtype)
        require(
            torch.equal(comm.allreduce(third, "product"), exact), f"a product of {dtype} is coarse"
        )
    whole = comm.allreduce(torch.tensor([comm.rank + 1], device="cpu"), "product")
    require(int(whole) == torch.arange(1, comm.size + 1).prod(), "a product of integers")


def check_messages(comm: Communicator) -> None:
    """Messages are matched by source and tag, in any order of arrival, with wildcards for both.

    Rank 0 receives, all others send three messages each: small, with a tensor, long.
    """
    if comm.size == 1:
        return
    if comm.rank:
        comm.send_obj(("first", comm.rank), 0, tag=comm.rank)
        comm.send(seeded(comm.rank, 40_003), 0, tag=100 + comm.rank)
        comm.send_obj("x" * 5000, 0, tag=2**40)
        return
    last = comm.size - 1
    _near(comm.recv_obj(last, tag=100 + last), seeded(last, 40_003), "a tensor after another tag")
    status = Status()
    sources = set()
    for _ in range(last):
        text = comm.recv_obj(ANY_SOURCE, tag=2**40, status=status)
        require(text == "x" * 5000 and status.tag == 2**40, f"a long text of {status}")
        sources.add(status.source)
    require(sources == set(range(1, comm.size)), f"messages of any source came from {sources}")
    for source in range(1, comm.size):
        got = comm.recv_obj(source, tag=ANY_TAG, status=status)
        require(got == ("first", source), f"the first message of rank {source} is {got}")
        require(
            (status.source, status.tag) == (source, source), f"{status} is not of rank {source}"
        )
    for _ in range(last - 1):
        tensor = comm.recv(ANY_SOURCE, ANY_TAG, status)
        require(status.tag == 100 + status.source, f"a tensor of {status}")
        _near(tensor, seeded(status.source, 40_003), "a tensor of any source")


def check_subgroup(comm: Communicator) -> None:
    """A list of ranks makes a communicator of these, in this order; None elsewhere."""
    ranks = [rank for rank in reversed(range(comm.size)) if rank != 1]
    part = comm.subgroup(ranks)
    require((part is None) == (comm.rank not in ranks), "subgroup: members")
    if part is not None:
        require((part.rank, part.size) == (ranks.index(comm.rank), len(ranks)), "subgroup: ranks")
        require(type(part) is type(comm) and part.timeout_s == comm.timeout_s, "subgroup: settings")
        require(part.allgather_obj(comm.rank) == ranks, "subgroup: order")
        total = torch.tensor([float(comm.rank)], device="cpu")
        part.route.sum_(total)
        require(float(total) == sum(ranks), "subgroup: sum")
        part.finalize()
    other = comm.subgroup([comm.size - 1])
    require((other is None) == (comm.rank != comm.size - 1), "subgroup: a second one")
    if other is not None:
        other.finalize()
    _check_together(comm)


CONTRACTS = contracts_in(globals())


def check_all(comm: Communicator) -> None:
    """Every contract of this file, one after another."""
    for contract in CONTRACTS:
        contract(comm)


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:  # each contract checks the type
        return error
    return None


def _check_together(comm: Communicator) -> None:
    try:
        ranks = comm.allgather_obj(comm.rank)
    except RankMismatchError as error:
        raise ContractError(f"ranks are in different calls: {error}") from error
    require(ranks == list(range(comm.size)), "ranks are not together")


def _near(got: object, expected: Tensor, what: str) -> None:
    require(isinstance(got, Tensor) and got.shape == expected.shape, f"{what}: {got!r}")
    require(torch.allclose(torch.as_tensor(got), expected, rtol=1e-9, atol=1e-9), f"{what} is off")
