"""What every communicator, over every transport, world size and placement, must do.

Each function takes a communicator, is called on every rank, and raises `ContractError` where the
contract is broken. Ranks may be threads: nothing here touches the shared random generator.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.comm import Communicator
from torchmn.comm.allreduce import ReduceBlock, create_allreduce
from torchmn.comm.checksums import checksum
from torchmn.comm.codecs import create_codec
from torchmn.exchange.optimizer import create_multi_node_optimizer

SIZES = (1, 2, 3, 7, 16, 1000, 40_003)
MOVED_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


class ContractError(AssertionError):
    """A communicator does not do what it must."""


def require(condition: object, what: str) -> None:
    """Raise ContractError unless ``condition`` holds."""
    if not condition:
        raise ContractError(what)


def contracts_in(suite: dict[str, Any]) -> tuple[Callable[..., None], ...]:
    """The contracts that a suite has defined so far, from its ``globals()``."""
    own = {k: v for k, v in suite.items() if getattr(v, "__module__", "") == suite["__name__"]}
    return tuple(contract for name, contract in own.items() if name.startswith("check_"))


def seeded(rank: int, *shape: int, dtype: torch.dtype = torch.float64, salt: int = 0) -> Tensor:
    """A new tensor that any rank can compute for any rank."""
    values = _drawn(1000 * salt + rank, shape)
    return (values > 0) if dtype == torch.bool else values.to(dtype, copy=True)


@functools.lru_cache(maxsize=1024)
def _drawn(seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 10


def check_sum(comm: Communicator) -> None:
    """The route's sum is the sum, the same bits on every rank, for odd sizes too."""
    for dtype in (torch.float64, torch.float32):
        for size in SIZES:
            buffer = seeded(comm.rank, size, dtype=dtype)
            expected = torch.stack([seeded(r, size, dtype=dtype) for r in range(comm.size)]).sum(0)
            comm.route.sum_(buffer)
            tolerance = (1e-12 if dtype == torch.float64 else 1e-5) * comm.size
            error = float((buffer - expected).abs().max())
            require(
                error <= 10 * tolerance, f"{comm.name}: sum of {size} {dtype} is off by {error}"
            )
            for rank, other in enumerate(comm.allgather(buffer)):
                require(torch.equal(other, buffer), f"{comm.name}: rank {rank} has other bits")


def check_coded_sum(comm: Communicator) -> None:
    """With float16 messages: close, the same bits on every rank, exact elements exact."""
    for codec, relative in (("float16", 2e-3), ("bfloat16", 2e-2)):
        algorithm = create_allreduce(create_codec(codec))
        for size in SIZES:
            buffer = torch.cat(
                [seeded(comm.rank, size, dtype=torch.float32), torch.full((2,), 0.3001)]
            )
            expected = torch.stack([seeded(r, size, dtype=torch.float32) for r in range(comm.size)])
            comm.route.sum_(ReduceBlock(buffer, num_exact=2), algorithm)
            bound = relative * float(expected.abs().sum(0).max()) + 1e-6
            error = float((buffer[:size] - expected.sum(0)).abs().max())
            require(error <= bound, f"{comm.name}+{codec}: sum of {size} is off by {error}")
            off = float((buffer[size:] - comm.size * 0.3001).abs().max())
            require(off < 1e-5, f"{comm.name}+{codec}: exact elements are off by {off}")
            for other in comm.allgather(buffer):
                require(torch.equal(other, buffer), f"{comm.name}+{codec}: ranks differ")


def check_started_sums(comm: Communicator) -> None:
    """Started sums that are not waited for do not mix; blocking calls are queued after them."""
    buffers = [seeded(comm.rank, size, salt=i) for i, size in enumerate((50_000, 3, 1000))]
    works = [
        comm.engine.submit(comm.route.sum_job(b, bucket=i, step=7)) for i, b in enumerate(buffers)
    ]
    flag = comm.allreduce(torch.tensor([comm.rank + 1]))
    for work in works:
        work.wait()
    require(int(flag) == comm.size * (comm.size + 1) // 2, "a blocking call overtook wrongly")
    for i, buffer in enumerate(buffers):
        expected = sum(seeded(r, buffer.numel(), salt=i) for r in range(comm.size))
        require(torch.allclose(buffer, torch.as_tensor(expected)), f"started sum {i} is wrong")
    if comm.size > 1:
        labels = {e.bucket for e in comm.flight_recorder.entries() if e.step == 7}
        require(labels == {0, 1, 2}, f"the flight recorder has buckets {labels}")


def check_tensor_collectives(comm: Communicator) -> None:
    """send, recv, bcast, gather, allgather, alltoall, scatter, for dtypes and uneven shapes."""
    for dtype in MOVED_DTYPES:
        root = comm.size - 1
        own = seeded(comm.rank, comm.rank + 1, 2, dtype=dtype)  # another shape on every rank
        theirs = [seeded(r, r + 1, 2, dtype=dtype) for r in range(comm.size)]
        require(torch.equal(comm.bcast(own, root), theirs[root]), f"bcast {dtype}")
        _same(comm.allgather(own), theirs, f"allgather {dtype}")
        gathered = comm.gather(own, root)
        if comm.rank == root:
            _same(gathered or (), theirs, f"gather {dtype}")
        else:
            require(gathered is None, "gather gives None elsewhere")
        scattered = comm.scatter(theirs if comm.rank == root else None, root)
        require(torch.equal(scattered, theirs[comm.rank]), f"scatter {dtype}")
        parts = [seeded(comm.rank, peer, 3, dtype=dtype, salt=peer) for peer in range(comm.size)]
        expected = [seeded(r, comm.rank, 3, dtype=dtype, salt=comm.rank) for r in range(comm.size)]
        _same(comm.alltoall(parts), expected, f"alltoall {dtype}")
    _check_ring(comm)
    stacked = torch.arange(comm.size * 2.0).view(comm.size, 2)
    row = comm.scatter(stacked if comm.rank == 0 else None)
    require(torch.equal(row, stacked[comm.rank]), "scatter of one tensor by its first axis")


def _check_ring(comm: Communicator) -> None:
    """Around the ring, one at a time: tensors, tuples, transposed tensors, empty ones."""
    if comm.size == 1:
        return
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    messages: Sequence[Any] = (
        seeded(comm.rank, 3, 4).t(),
        (seeded(comm.rank, 2), seeded(comm.rank, 0), torch.tensor(comm.rank)),
    )
    for tag, message in enumerate(messages):
        if comm.rank == 0:
            comm.send(message, following, tag)
            got = comm.recv(previous, tag)
        else:
            got = comm.recv(previous, tag)
            comm.send(message, following, tag)
        expected = (
            (seeded(previous, 3, 4).t(),)
            if tag == 0
            else (seeded(previous, 2), seeded(previous, 0), torch.tensor(previous))
        )
        _same(got if isinstance(got, tuple) else (got,), expected, "the ring")


def check_reductions(comm: Communicator) -> None:
    """allreduce and reduce_scatter: sum, mean, max, min; 16-bit sums are formed in float32."""
    folds: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda t: t.sum(0),
        "max": lambda t: t.amax(0),
        "min": lambda t: t.amin(0),
        "mean": lambda t: t.mean(0),
    }
    for dtype in (torch.float64, torch.float32, torch.int64, torch.int32, torch.int16, torch.uint8):
        for op, fold in folds.items():
            if op == "mean" and not dtype.is_floating_point:
                continue
            shape = (3, 5)
            all_ranks = torch.stack(
                [seeded(r, *shape, dtype=dtype).abs() % 16 for r in range(comm.size)]
            )
            result = comm.allreduce(all_ranks[comm.rank], op)  # type: ignore[arg-type]
            expected = fold(all_ranks).to(dtype)
            require(
                torch.allclose(result.double(), expected.double(), atol=1e-5),
                f"allreduce {op} {dtype}",
            )
            parts = torch.stack(
                [
                    torch.stack(
                        [seeded(r, 4, dtype=dtype, salt=p).abs() % 16 for p in range(comm.size)]
                    )
                    for r in range(comm.size)
                ]
            )
            mine = comm.reduce_scatter(parts[comm.rank], op)  # type: ignore[arg-type]
            expected = fold(parts[:, comm.rank]).to(dtype)
            require(
                torch.allclose(mine.double(), expected.double(), atol=1e-5),
                f"reduce_scatter {op} {dtype}",
            )
    for dtype, half_ulp in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
        values = [
            torch.tensor([1.0 if r == 0 else half_ulp], dtype=dtype) for r in range(comm.size)
        ]
        exact = sum(v.float() for v in values)
        result = comm.allreduce(values[comm.rank])
        require(result == torch.as_tensor(exact).to(dtype), f"a sum of {dtype} was rounded early")
    boolean = comm.allreduce(torch.tensor([comm.rank == 0, False]), "max")
    require(boolean.tolist() == [True, False] and boolean.dtype == torch.bool, "bool max")


def check_objects(comm: Communicator) -> None:
    """Objects arrive equal, of the same types, nested, with tensors inside."""
    for rank, got in enumerate(comm.allgather_obj(_sample(comm.rank))):
        require_same(got, _sample(rank))
    root = comm.size - 1
    require_same(comm.bcast_obj(_sample(comm.rank), root), _sample(root))
    gathered = comm.gather_obj(_sample(comm.rank), root)
    require((gathered is not None) == (comm.rank == root), "gather_obj gives a list at the root")
    objects = [_sample(r) for r in range(comm.size)] if comm.rank == root else None
    require_same(comm.scatter_obj(objects, root), _sample(comm.rank))
    require(comm.allreduce_obj(comm.rank + 1) == comm.size * (comm.size + 1) // 2, "allreduce_obj")
    require(comm.allreduce_obj([comm.rank]) == list(range(comm.size)), "lists are added in order")


class Mode(enum.Enum):
    """Sent by its name."""

    TRAIN = 1
    EVALUATE = 2


@dataclass(frozen=True)
class Settings:
    """Sent by its attributes."""

    out: Path
    mode: Mode
    losses: deque[float]


def _sample(rank: int) -> Any:
    return {
        "numbers": [rank, -(2**70), 1.5, float("inf"), True, None],
        "text": f"rank {rank} 日本語",
        ("tuple", 1): (b"\x00\xff" * rank, {rank, "a"}),
        "tensor": seeded(rank, rank, 2),
        "scalar": torch.tensor(rank, dtype=torch.int32),
        "array": seeded(rank, 2, 3).numpy(),
        "dtype": torch.bfloat16,
        "settings": Settings(Path("runs") / str(rank), Mode.EVALUATE, deque([rank], maxlen=2)),
        5: {},
    }


def require_same(got: Any, expected: Any) -> None:
    """Raise ContractError unless types and values are the same, of all that is within."""
    require(type(got) is type(expected), f"{type(got)} instead of {type(expected)}")
    if isinstance(expected, dict):
        require(list(got) == list(expected), "keys differ")
        for key in expected:
            require_same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        require(len(got) == len(expected), "lengths differ")
        for a, b in zip(got, expected, strict=True):
            require_same(a, b)
    elif isinstance(expected, Tensor):
        require(torch.equal(got, expected) and got.dtype == expected.dtype, "tensors differ")
    elif hasattr(expected, "tobytes"):
        require(
            (got.dtype, got.shape) == (expected.dtype, expected.shape)
            and got.tobytes() == expected.tobytes(),
            "arrays differ",
        )
    else:
        require(got == expected, f"{got!r} instead of {expected!r}")


def check_split(comm: Communicator) -> None:
    """Even and odd ranks apart, in reverse order; class and settings stay."""
    part = comm.split(comm.rank % 2, -comm.rank)
    members = [r for r in reversed(range(comm.size)) if r % 2 == comm.rank % 2]
    require(part.size == len(members) and members[part.rank] == comm.rank, "split: ranks")
    require(type(part) is type(comm), "split: class")
    require(part.timeout_s == comm.timeout_s and part.codec is comm.codec, "split: settings")
    buffer = torch.tensor([float(comm.rank)])
    part.route.sum_(buffer)
    require(float(buffer) == sum(members), "split: sum")
    part.finalize()


def check_bcast_data(comm: Communicator) -> None:
    """Parameters and buffers of rank 0 on every rank, transposed ones too; buffers may grow."""
    model = network(comm.rank)
    model.register_buffer("steps", torch.tensor(comm.rank + 5))
    model.odd = nn.Parameter(seeded(comm.rank, 4, 3).t())
    comm.bcast_data(model)
    reference = network(0)
    for name, tensor in reference.named_parameters():
        require(torch.equal(model.get_parameter(name), tensor), f"bcast_data: {name}")
    require(int(model.steps) == 5, "bcast_data: integer buffer")  # type: ignore[arg-type]
    require(torch.equal(model.odd, seeded(0, 4, 3).t()), "bcast_data: strided parameter")
    checksum([model.steps])  # type: ignore[list-item]
    grown = model.steps.untyped_storage().resizable()  # type: ignore[operator,union-attr]
    require(grown, "bcast_data: a buffer cannot be resized")


def check_mean_grad(comm: Communicator) -> None:
    """multi_node_mean_grad: the mean; None is skipped or filled; twice, to use buffers again."""
    for _ in range(2):
        model = network(0)
        first, second, *rest = model.parameters()
        first.grad = torch.full_like(first, float(comm.rank))
        if comm.rank == 0:
            second.grad = torch.ones_like(second)
        comm.multi_node_mean_grad(model, zero_fill=True)
        mean = (comm.size - 1) / 2
        require(torch.allclose(first.grad, torch.full_like(first, mean)), "mean of ranks")
        require(
            second.grad is not None
            and torch.allclose(second.grad, torch.full_like(second, 1 / comm.size)),
            "a missing gradient counts as zeros",
        )
        require(all(p.grad is not None and not p.grad.any() for p in rest), "zero_fill")


def check_exactness(comm: Communicator) -> None:
    """20 steps on shards of a batch give the parameters of one process on the whole, to 1e-12."""
    inputs, targets = training_data()
    reference = _trained_by_one_process()
    model = network(comm.rank)  # the broadcast must make them equal
    optimizer = create_multi_node_optimizer(sgd(model), comm, model)
    for x, y in zip(inputs, targets, strict=True):
        share = slice(comm.rank * len(x) // comm.size, (comm.rank + 1) * len(x) // comm.size)
        step(model, optimizer, x[share], y[share])
    for (name, got), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        error = float((got - expected).detach().abs().max())
        require(error < 1e-12, f"{comm.name}: {name} is off by {error} after 20 steps")


@functools.cache
def _trained_by_one_process() -> nn.Module:
    """The network after the training that `check_exactness` repeats on shards."""
    reference = network(0)
    optimizer = sgd(reference)
    for x, y in zip(*training_data(), strict=True):
        step(reference, optimizer, x, y)
    return reference


def network(seed: int) -> nn.Sequential:
    """A small float64 network with a convolution, no batch normalization."""
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 4 * 4, 11), nn.Tanh(),
        nn.Linear(11, 4),
    )  # fmt: skip
    return filled(model, seed)


def filled(model: nn.Sequential, seed: int = 0) -> nn.Sequential:
    """In float64, with parameters that any rank can compute."""
    with torch.no_grad():
        for i, parameter in enumerate(model.double().parameters()):
            parameter.copy_(seeded(seed, *parameter.shape, salt=i) / 30)
    return model


def require_near(got: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    """Raise ContractError unless float64 parameters are equal to rounding."""
    for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        error = float((mine - theirs).detach().abs().max())
        require(error <= 1e-10, f"{what}: parameter {index} is off by {error}")


def training_data(num_steps: int = 20, batch: int = 24) -> tuple[Tensor, Tensor]:
    """(steps, batch, 1, 6, 6) inputs, (steps, batch) labels of 4 classes; 24 divides by 1 to 4."""
    labels = seeded(8, num_steps, batch).abs().long() % 4
    return seeded(7, num_steps, batch, 1, 6, 6) / 10, labels


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """One training step; returns the local loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


CONTRACTS = contracts_in(globals())


OF_COLLECTIVES = (check_tensor_collectives, check_reductions, check_objects, check_bcast_data)
"""Of calls that do not use the route."""


def check_all(comm: Communicator) -> None:
    """Every contract, one after another."""
    for contract in CONTRACTS:
        contract(comm)


def check_route(comm: Communicator) -> None:
    """Those that another route may break."""
    for contract in CONTRACTS:
        if contract not in OF_COLLECTIVES:
            contract(comm)


def _same(got: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    require(len(got) == len(expected), f"{what}: {len(got)} tensors instead of {len(expected)}")
    for a, b in zip(got, expected, strict=True):
        require(a.dtype == b.dtype and a.shape == b.shape, f"{what}: {a.dtype} {a.shape}")
        require(torch.equal(a, b), f"{what}: values differ")
