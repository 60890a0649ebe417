"""What differentiable communication must do, over every transport and number of ranks.

The measure is one process: the same program written there, with the values of all ranks as leaves
and the sum of the losses of all ranks. Each contract takes a communicator and the functions, is
called on every rank, and raises `ContractError`. Ranks may be threads: nothing here touches the
shared random generator.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torchmn.nn.functions
from tests.contracts.suites.communicator_contracts import contracts_in, require, seeded
from torchmn.comm import Communicator

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
Program = Callable[[Any, list[Tensor]], list[Tensor]]


def _leaf(rank: int, *shape: int, salt: int = 0) -> Tensor:
    return (seeded(rank, *shape, salt=salt) / 10).requires_grad_()


def _close(got: Tensor | None, expected: Tensor | None, what: str) -> None:
    if expected is None:
        expected = torch.zeros_like(got) if got is not None else None
    if got is None or expected is None:
        zeros = expected if got is None else got
        require(zeros is None or not zeros.abs().sum(), f"{what}: no gradient")
        return
    require(got.shape == expected.shape, f"{what}: shape {got.shape} and not {expected.shape}")
    error = float((got - expected).abs().max()) if got.numel() else 0.0
    scale = 1.0 + (float(expected.abs().max()) if got.numel() else 0.0)
    require(error <= 1e-12 * scale, f"{what}: off by {error}")


def _loss(outputs: Sequence[Tensor], rank: int) -> Tensor:
    """Not symmetric in outputs and ranks, and not linear."""
    total = torch.zeros((), dtype=torch.float64)
    for index, output in enumerate(outputs):
        total = total + (output * output * (0.3 + rank + 2 * index) + output).sum()
    return total


# ---- collectives ----


def _bcast(f, comm, x, size, root):
    return [f.bcast(comm, x if comm.rank == root else None, root)]


def _gather(f, comm, x, size, root):
    gathered = f.gather(comm, x, root)
    return list(gathered) if comm.rank == root else [gathered]


def _scatter(f, comm, x, size, root):
    parts = [x * (r + 1) for r in range(size)] if comm.rank == root else None
    return [f.scatter(comm, parts, root)]


def _scatter_rows(f, comm, x, size, root):
    return [f.scatter(comm, torch.stack([x * (r + 1) for r in range(size)]), root)]


REDUCE = {"sum": torch.sum, "mean": torch.mean}
COLLECTIVES: dict[str, tuple[bool, Callable, Callable]] = {
    # name: (whether shapes may differ, what a rank does, what one process does for that rank)
    "bcast": (True, _bcast, lambda xs, rank, root: [xs[root] * 1]),
    "gather": (True, _gather, lambda xs, rank, root: list(xs) if rank == root else []),
    "scatter": (True, _scatter, lambda xs, rank, root: [xs[root] * (rank + 1)]),
    "scatter rows": (True, _scatter_rows, lambda xs, rank, root: [xs[root] * (rank + 1)]),
    "alltoall": (
        True,
        lambda f, comm, x, size, root: list(f.alltoall(comm, [x * (r + 1) for r in range(size)])),
        lambda xs, rank, root: [x * (rank + 1) for x in xs],
    ),
    "allgather": (
        True,
        lambda f, comm, x, size, root: list(f.allgather(comm, x)),
        lambda xs, rank, root: list(xs),
    ),
    **{
        f"allreduce {op}": (
            False,
            lambda f, comm, x, size, root, op=op: [f.allreduce(comm, x, op)],
            lambda xs, rank, root, reduce=reduce: [reduce(torch.stack(xs), 0)],
        )
        for op, reduce in REDUCE.items()
    },
    **{
        f"reduce_scatter {op}": (
            False,
            lambda f, comm, x, size, root, op=op: [
                f.reduce_scatter(comm, [x * (r + 1) for r in range(size)], op)
            ],
            lambda xs, rank, root, reduce=reduce: [reduce(torch.stack(xs) * (rank + 1), 0)],
        )
        for op, reduce in REDUCE.items()
    },
}
WITH_ROOT = {"bcast", "gather", "scatter", "scatter rows"}


def _shapes(comm: Communicator, may_differ: bool) -> list[list[tuple[int, ...]]]:
    equal = [[shape] * comm.size for shape in ((2, 3), (), (0, 4))]
    uneven = [[(rank, 2) for rank in range(comm.size)]]
    return equal + uneven if may_differ else equal


def check_collectives(comm: Communicator, f: Any = torchmn.nn.functions) -> None:
    """Results and gradients of one process, for all roots, uneven, empty and 0-dim tensors."""
    for name, (may_differ, run, reference) in COLLECTIVES.items():
        for shapes in _shapes(comm, may_differ):
            for root in {0, comm.size - 1} if name in WITH_ROOT else {0}:
                leaves = [_leaf(rank, *shapes[rank]) for rank in range(comm.size)]
                # rows and a slice with strides
                own = leaves[comm.rank].detach().clone().requires_grad_()
                outputs = run(f, comm, _strided(own), comm.size, root)
                wanted = [reference(leaves, rank, root) for rank in range(comm.size)]
                for got, expected in zip(outputs, wanted[comm.rank], strict=False):
                    _close(got.detach(), expected.detach(), f"{name} of {shapes}")
                (_loss(outputs, comm.rank) + 0 * own.sum()).backward()
                sum(_loss(each, rank) for rank, each in enumerate(wanted)).backward()
                _close(own.grad, leaves[comm.rank].grad, f"gradient of {name} of {shapes}")


def _strided(x: Tensor) -> Tensor:
    """The same values, not contiguous."""
    return torch.stack([x, x], dim=-1)[..., 0]


def check_dtypes(comm: Communicator, f: Any = torchmn.nn.functions) -> None:
    """Every floating dtype keeps itself, forward and backward; 16 bits are summed exactly once."""
    for dtype in DTYPES:
        x = torch.full((3,), 1.5, dtype=dtype, requires_grad=True)
        outputs = [*f.allgather(comm, x), f.allreduce(comm, x), f.bcast(comm, x)]
        outputs += f.alltoall(comm, [x] * comm.size)
        if comm.size > 1:
            outputs.append(_around(comm, f, x))
        for output in outputs:
            require(output.dtype == dtype, f"{dtype} became {output.dtype}")
        torch.stack([o.abs().sum() for o in outputs]).sum().backward()
        require(
            x.grad is not None and x.grad.dtype == dtype, f"the gradient of {dtype} has another"
        )
    labels = f.allgather(comm, torch.tensor([comm.rank]))
    require([int(x) for x in labels] == list(range(comm.size)), "integers are gathered")
    require(not any(x.requires_grad for x in labels), "integers require no gradient")


def _around(comm: Communicator, f: Any, x: Tensor) -> Tensor:
    """To the next rank, from the previous one; even ranks send first."""
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank == 0:
        return f.recv(comm, previous, f.send(x, comm, following))
    got = f.recv(comm, previous)
    return f.pseudo_connect(f.send(x, comm, following), got)


def check_who_requires_a_gradient(comm: Communicator, f: Any = torchmn.nn.functions) -> None:
    """Results require one where any rank's input does; nothing is recorded under no_grad."""
    for name, (_, run, reference) in COLLECTIVES.items():
        only = comm.size - 1
        leaves = [_leaf(rank, 2).requires_grad_(rank == only) for rank in range(comm.size)]
        own = leaves[comm.rank].detach().clone().requires_grad_(comm.rank == only)
        outputs = run(f, comm, own * 1, comm.size, only)
        require(all(o.requires_grad for o in outputs), f"{name}: a rank does not know of gradients")
        (_loss(outputs, comm.rank) + 0 * own.sum()).backward()
        sum(_loss(reference(leaves, r, only), r) for r in range(comm.size)).backward()
        if comm.rank == only:
            _close(own.grad, leaves[only].grad, f"{name} with one gradient")
        with torch.no_grad():
            outputs = run(f, comm, own, comm.size, only)
        require(not any(o.requires_grad for o in outputs), f"{name} records under no_grad")
        outputs = run(f, comm, own.detach(), comm.size, only)
        require(not any(o.requires_grad for o in outputs), f"{name} invents a gradient")


# ---- graphs over ranks ----


class _Worlds:
    """A program of all ranks: on one process, or its part of one rank."""

    def __init__(self, size: int, comm: Communicator | None, f: Any, *, explicit: bool) -> None:
        self.size, self.comm, self.f, self.explicit = size, comm, f, explicit
        ranks = range(size) if comm is None else (comm.rank,)
        self.weights = {rank: _leaf(rank, 3, 3, salt=9) for rank in ranks}
        self.values = {rank: _leaf(rank, 2, 3, salt=8) * 1 for rank in ranks}
        self.delegates: list[Tensor] = []

    def layer(self, rank: int) -> None:
        """Apply a rank's weights."""
        if rank in self.values:
            self.values[rank] = (self.values[rank] @ self.weights[rank]).tanh()

    def message(self, source: int, dest: int) -> None:
        """Add a rank's value to that of another."""
        if self.comm is None:
            self.values[dest] = self.values[dest] + self.values[source].sin()
        elif self.comm.rank == source:
            delegate = self.f.send(self.values[source], self.comm, dest)
            if self.explicit:
                self.delegates.append(delegate)
        elif self.comm.rank == dest:
            delegate = self.delegates.pop() if self.delegates else None
            got = self.f.recv(self.comm, source, delegate)
            self.values[dest] = self.values[dest] + got.sin()

    def move(self, source: int, dest: int) -> None:
        """Replace a rank's value by that of another, which begins again from its weights.

        What is not part of the loss any more needs a delegate.
        """
        if source in self.weights:
            fresh = torch.ones(2, 3, dtype=torch.float64) + self.weights[source].mean()
        if self.comm is None:
            self.values[dest] = self.values[source]
            self.values[source] = fresh
        elif self.comm.rank == source:
            self.delegates.append(self.f.send(self.values[source], self.comm, dest))
            self.values[source] = fresh
        elif self.comm.rank == dest:
            got = self.f.recv(self.comm, source)
            self.delegates.append(self.values[dest].sum() * 0)
            self.values[dest] = got

    def mean(self) -> None:
        """The mean of all ranks, on all."""
        if self.comm is None:
            mean = sum(self.values.values()) / self.size
            self.values = {rank: value + mean for rank, value in self.values.items()}
        else:
            own = self.values[self.comm.rank]
            self.values[self.comm.rank] = own + self.f.allreduce(self.comm, own, "mean")

    def gradients(self) -> dict[int, Tensor | None]:
        """Of the weights, after backward of the sum of all losses."""
        losses = [_loss([value], rank) for rank, value in self.values.items()]
        total = torch.stack(losses).sum()
        for delegate in self.delegates:
            total = self.f.pseudo_connect(delegate, total)
        total.backward()
        return {rank: weight.grad for rank, weight in self.weights.items()}


def _compare(comm: Communicator, f: Any, what: str, program: Callable[[_Worlds], None]) -> None:
    expected = _Worlds(comm.size, None, f, explicit=True)
    program(expected)
    wanted = expected.gradients()[comm.rank]
    for explicit in (True, False):
        own = _Worlds(comm.size, comm, f, explicit=explicit)
        program(own)
        value = own.values[comm.rank].detach()
        _close(value, expected.values[comm.rank].detach(), f"{what}")
        how = "with delegates" if explicit else "without delegates"
        _close(own.gradients()[comm.rank], wanted, f"gradients of {what} {how}")


def check_graphs(comm: Communicator, f: Any = torchmn.nn.functions) -> None:
    """Cycles, crossing messages, branches and twists have the gradients of one process."""
    ranks = range(comm.size)

    def cycle(w: _Worlds) -> None:
        for rank in ranks:
            w.layer(rank)
            if comm.size > 1:
                w.message(rank, (rank + 1) % w.size)
        w.layer(0)

    def crossing(w: _Worlds) -> None:
        for a in ranks:
            for b in range(a):
                w.message(a, b)
                w.layer(b)
                w.message(b, a)

    def branching(w: _Worlds) -> None:
        for rank in ranks[1:]:
            w.message(0, rank)
            w.layer(rank)
        for rank in ranks[1:]:
            w.message(rank, 0)
        w.layer(0)

    def twisting(w: _Worlds) -> None:
        for _ in range(2):
            for rank in ranks[1:]:
                w.message(rank, rank - 1)
                w.layer(rank - 1)
            for rank in reversed(ranks[1:]):
                w.message(rank - 1, rank)
                w.layer(rank)

    for program in (cycle, crossing, branching, twisting):
        _compare(comm, f, program.__name__, program)


def check_random_programs(comm: Communicator, f: Any = torchmn.nn.functions) -> None:
    """Programs that mix messages, moves, collectives and layers in any order."""
    for seed in range(6):
        dice = random.Random(1000 * comm.size + seed)
        steps = []
        for _ in range(12):
            kind = dice.choice(["layer", "message", "message", "move", "mean"])
            if kind == "mean":
                steps.append((kind, ()))
            elif kind == "layer":
                steps.append((kind, (dice.randrange(comm.size),)))
            elif comm.size > 1:
                steps.append((kind, tuple(dice.sample(range(comm.size), 2))))

        def program(w: _Worlds, steps: list = steps) -> None:
            for kind, ranks in steps:
                getattr(w, kind)(*ranks)

        _compare(comm, f, f"program {seed}", program)


def check_chains(comm: Communicator, f: Any = torchmn.nn.functions) -> None:
    """Layers on ranks one after another: ranks without a loss call backward on the delegate."""
    weights = [_leaf(rank, 3, 3, salt=5) for rank in range(comm.size)]
    x = seeded(0, 4, 3, salt=6) / 10
    y = x
    for weight in weights:
        y = (y @ weight).tanh()
    _loss([y], 0).backward()
    own = weights[comm.rank].detach().clone().requires_grad_()
    for _ in range(2):  # and again, in another step
        own.grad = None
        value = x if comm.rank == 0 else f.recv(comm, comm.rank - 1, tag=3)
        value = (value @ own).tanh()
        if comm.rank < comm.size - 1:
            f.send(value, comm, comm.rank + 1, tag=3).backward()
        else:
            _close(value.detach(), y.detach(), "a chain")
            _loss([value], 0).backward()
        _close(own.grad, weights[comm.rank].grad, "gradients of a chain")


def check_tuples(comm: Communicator, f: Any = torchmn.nn.functions) -> None:
    """Several tensors of any shapes and dtypes in one message, with and without gradients."""
    if comm.size == 1:
        return
    if comm.rank == 0:
        a, b = _leaf(0, 2, 3), _leaf(0)
        index = torch.tensor([[1, 2]])
        f.send((a.t() * 2, index, b * 3, torch.zeros(0)), comm, 1).backward()
        _close(a.grad, 4 * seeded(1, 3, 2).t() * 1.0, "the gradient of a tuple's first")
        _close(b.grad, 6 * torch.ones((), dtype=torch.float64), "the gradient of a tuple's second")
    elif comm.rank == 1:
        a, index, b, empty = f.recv(comm, 0)
        require(index.tolist() == [[1, 2]] and not index.requires_grad, "an integer of a tuple")
        require(a.shape == (3, 2) and b.shape == () and empty.shape == (0,), "shapes of a tuple")
        require(a.requires_grad and b.requires_grad and not empty.requires_grad, "flags of a tuple")
        (2 * (a * seeded(1, 3, 2)).sum() + 2 * b).backward()
    pair = (comm.rank ^ 1) if (comm.rank ^ 1) < comm.size else None
    if pair is not None:
        if comm.rank < pair:
            f.send(torch.ones(1), comm, pair)
        else:
            got = f.recv(comm, pair, force_tuple=True)
            require(isinstance(got, tuple), "force_tuple")


# ---- ways to run backward ----


def check_double_backward(comm: Communicator, f: Any = torchmn.nn.functions) -> None:
    """Gradients of gradients, as a gradient penalty takes them."""
    for name, (_, run, reference) in COLLECTIVES.items():
        leaves = [_leaf(rank, 2, salt=3) for rank in range(comm.size)]
        own = leaves[comm.rank].detach().clone().requires_grad_()
        loss = _loss(run(f, comm, own * 1, comm.size, 0), comm.rank) + (own * own).sum()
        loss.backward(create_graph=True)
        grad, own.grad = own.grad, None
        whole = sum(
            _loss(reference(leaves, r, 0), r) + (leaves[r] * leaves[r]).sum()
            for r in range(comm.size)
        )
        wanted = torch.autograd.grad(whole, leaves, create_graph=True)
        _close(grad.detach(), wanted[comm.rank].detach(), f"{name} with create_graph")
        if name.startswith(("bcast", "gather", "scatter")):
            continue  # only the root has a path from the gradients to the second backward
        (grad * grad).sum().backward()
        sum((g * g).sum() for g in wanted).backward()
        _close(own.grad, leaves[comm.rank].grad, f"double backward of {name}")


def check_retained_graphs(comm: Communicator, f: Any = torchmn.nn.functions) -> None:
    """Two passes over a graph that is retained on all ranks give twice the gradient."""
    own = _leaf(comm.rank, 2)
    loss = _loss(f.allgather(comm, own), comm.rank)
    if comm.size > 1:
        loss = loss + _loss([_around(comm, f, own * own)], comm.rank)
    loss.backward(retain_graph=True)
    once = own.grad.clone() if own.grad is not None else None
    loss.backward()
    require(once is not None, "no gradient")
    _close(own.grad, None if once is None else 2 * once, "a second pass")


def check_checkpointed(comm: Communicator, f: Any = torchmn.nn.functions) -> None:
    """Checkpointed functions exchange once, and have the same gradients."""

    def block(x: Tensor, weight: Tensor) -> Tensor:
        y = (x @ weight).tanh()
        y = y + f.allreduce(comm, y.sin(), "mean")
        y = (y @ weight).tanh()
        if comm.size > 1:
            y = y + _around(comm, f, y.cos())
        return (y @ weight).tanh()

    def gradients(run: Callable) -> tuple[Tensor, Tensor | None]:
        weight, x = _leaf(comm.rank, 3, 3), _leaf(comm.rank, 2, 3, salt=1)
        y = run(run(x, weight), weight)
        _loss([y], comm.rank).backward()
        return y.detach(), weight.grad

    value, wanted = gradients(block)
    for use_reentrant in (False, True):

        def again(x: Tensor, weight: Tensor, is_reentrant: bool = use_reentrant) -> Tensor:
            return checkpoint(
                block, x, weight, use_reentrant=is_reentrant, preserve_rng_state=False
            )

        def twice(x: Tensor, weight: Tensor, is_reentrant: bool = use_reentrant) -> Tensor:
            return checkpoint(
                again, x, weight, use_reentrant=is_reentrant, preserve_rng_state=False
            )

        for run, how in ((again, "in a checkpoint"), (twice, "in nested checkpoints")):
            got, grad = gradients(run)
            _close(got, value, f"{how}, use_reentrant={use_reentrant}")
            _close(grad, wanted, f"gradients {how}, use_reentrant={use_reentrant}")


def check_autocast(comm: Communicator, f: Any = torchmn.nn.functions) -> None:
    """Under autocast dtypes are those of the inputs."""
    own = torch.full((2, 2), 0.5 + comm.rank, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = own @ own
        gathered = f.allgather(comm, product)
        total = f.allreduce(comm, own)
    require(gathered[0].dtype == torch.bfloat16, "autocast: a product is no bfloat16")
    require(total.dtype == torch.float32, "autocast changed the dtype of an all-reduce")
    (torch.stack(gathered).float().sum() + total.sum()).backward()
    require(own.grad is not None and own.grad.dtype == torch.float32, "autocast: the gradient")


def check_dropped_graphs(comm: Communicator, f: Any = torchmn.nn.functions) -> None:
    """Graphs without backward, as of an evaluation, are released and change no later gradient."""
    weight = _leaf(comm.rank, 3, 3)
    alive: list[weakref.ref[Tensor]] = []

    def forward(x: Tensor) -> Tensor:
        y = (x @ weight).tanh()
        alive.append(weakref.ref(y))
        y = f.allreduce(comm, y)
        if comm.size > 1:
            if comm.rank == 0:
                f.send((y @ weight).tanh(), comm, 1)
            elif comm.rank == 1:
                y = y + f.recv(comm, 0)
        return y

    x = torch.ones(2, 3, dtype=torch.float64)
    for _ in range(5):
        result = forward(x)
    gc.collect()
    kept = sum(reference() is not None for reference in alive[:-2])
    require(kept == 0, f"{kept} graphs of an evaluation are kept")
    del result
    f.allreduce(comm, weight.sum()).backward()
    _close(
        weight.grad, torch.full((3, 3), 1.0 * comm.size, dtype=torch.float64), "after evaluation"
    )


CONTRACTS = contracts_in(globals())


def check_all(comm: Communicator) -> None:
    """Every contract, with the functions of torchmn."""
    for contract in CONTRACTS:
        contract(comm)
