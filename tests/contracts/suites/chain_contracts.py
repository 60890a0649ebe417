"""What a chain of links over ranks must do: compute what one process computes.

Each function takes a communicator, is called on every rank, and raises `ContractError` where the
contract is broken. The graphs are those of ChainerMN's tests. Ranks may be threads: nothing here
touches the shared random generator.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.contracts.suites.communicator_contracts import require, seeded
from torchmn.comm import Communicator
from torchmn.nn import MultiNodeChainList

WIDTH = 3
Ranks = int | list[int] | None
Graph = Callable[[int, int], list[tuple[Ranks, Ranks]]]
"""rank_in and rank_out of the links of a rank, by the rank and the number of ranks."""


class Sum(nn.Module):
    """A layer of its inputs, whose order matters, in float64."""

    def __init__(self, salt: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded(salt, WIDTH, WIDTH) / 10)

    def forward(self, *inputs: Any) -> Tensor:
        tensors = [x[0] * x[1] if isinstance(x, tuple) else x for x in inputs]
        total = sum(x * (number + 1) for number, x in enumerate(tensors))
        return (total @ self.weight).tanh()


class Pair(Sum):
    """Returns two tensors and what is no tensor."""

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor, str]:  # type: ignore[override]
        y = super().forward(*inputs)
        return y, y.cos(), "a note"


def line(rank: int, size: int) -> list[tuple[Ranks, Ranks]]:
    return [(rank - 1 if rank else None, rank + 1 if rank < size - 1 else None)]


def cycle(rank: int, size: int) -> list[tuple[Ranks, Ranks]]:
    """From rank 0 through all others and back."""
    if size == 1:
        return [(None, 0), (0, None)]
    if rank == 0:
        return [(None, 1), (size - 1, None)]
    return [(rank - 1, (rank + 1) % size)]


def crossing(rank: int, size: int) -> list[tuple[Ranks, Ranks]]:
    """All ranks send to the next one, then receive from the last."""
    return [(None, (rank + 1) % size), ((rank - 1) % size, None)]


def crossing_twice(rank: int, size: int) -> list[tuple[Ranks, Ranks]]:
    after, before = (rank + 1) % size, (rank - 1) % size
    return [(None, after), (before, before), (after, None)]


def branching(rank: int, size: int, before: list[int], after: list[int]) -> Any:
    if rank == 0:
        return [(None, before), (after, None)]
    return [(0, 0)]


def branching_1(rank: int, size: int) -> list[tuple[Ranks, Ranks]]:
    children = [*range(1, size)] or [0]
    return branching(rank, size, children, children)


def branching_2(rank: int, size: int) -> list[tuple[Ranks, Ranks]]:
    """The parent is one of its children."""
    ranks = [*range(size)]
    return branching(rank, size, ranks, ranks)


def branching_3(rank: int, size: int) -> list[tuple[Ranks, Ranks]]:
    """Sent to itself last, taken first."""
    children = [*range(1, size)]
    return branching(rank, size, [*children, 0], [0, *children])


def branching_4(rank: int, size: int) -> list[tuple[Ranks, Ranks]]:
    """Taken in another order than sent."""
    ranks = [*range(size)]
    return branching(rank, size, ranks, ranks[::-1])


def twisting(rank: int, size: int) -> list[tuple[Ranks, Ranks]]:
    """One path up the ranks and one down, at the same time."""
    if size == 1:
        return [(None, None)]
    if rank == 0:
        return [(None, 1), (1, None)]
    if rank == size - 1:
        return [(rank - 1, None), (None, rank - 1)]
    return [(rank - 1, rank + 1), (rank + 1, rank - 1)]


def doubled(rank: int, size: int) -> list[tuple[Ranks, Ranks]]:
    """Two connections of the same ranks, which must not be exchanged."""
    if size == 1:
        return [(None, [0, 0]), ([0, 0], None)]
    if rank == 0:
        return [(None, 1), (None, [1, 1])]
    if rank == 1:
        return [([0, 0, 0], None)]
    return [(None, None)]


def beside(rank: int, size: int) -> list[tuple[Ranks, Ranks]]:
    """An output of rank 0 that does not depend on what it sends."""
    if size == 1 or rank > 1:
        return [(None, None)]
    return [(None, 1), (None, None)] if rank == 0 else [(0, None)]


GRAPHS: dict[str, Graph] = {
    graph.__name__: graph
    for graph in (
        *(line, cycle, crossing, crossing_twice, branching_1, branching_2, branching_3),
        *(branching_4, twisting, doubled, beside),
    )
}


def module_of(rank: int, index: int, graph: str) -> nn.Module:
    """The module of a link; that of rank 0 returns a tuple in one graph."""
    kind = Pair if graph == "cycle" and (rank, index) == (0, 0) else Sum
    return kind(7 * rank + index)


def make_chain(comm: Communicator, graph: str, **options: Any) -> MultiNodeChainList:
    chain = MultiNodeChainList(comm, **options)
    for index, (rank_in, rank_out) in enumerate(GRAPHS[graph](comm.rank, comm.size)):
        chain.add_link(module_of(comm.rank, index, graph), rank_in, rank_out)
    return chain


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def in_one_process(
    graph: str, size: int, inputs: Sequence[Tensor]
) -> tuple[dict[int, Tensor], list[list[nn.Module]]]:
    """The loss of each rank that has one, and all modules with their gradients.

    Each rank runs its links in the order in which they were added, as in ChainerMN; what is sent
    waits in a queue for each pair of ranks.
    """
    links = [GRAPHS[graph](rank, size) for rank in range(size)]
    modules = [[module_of(r, i, graph) for i in range(len(links[r]))] for r in range(size)]
    queues: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
    position = [0] * size
    losses: dict[int, Tensor] = {}
    while any(position[rank] < len(links[rank]) for rank in range(size)):
        before = list(position)
        for rank in range(size):
            if position[rank] == len(links[rank]):
                continue
            rank_in, rank_out = links[rank][position[rank]]
            sources = [rank_in] if isinstance(rank_in, int) else rank_in
            if sources is None:
                arguments: list[Any] = [inputs[rank]]
            else:
                if any(len(queues[s, rank]) < sources.count(s) for s in sources):
                    continue
                arguments = [queues[s, rank].popleft() for s in sources]
            output = modules[rank][position[rank]](*arguments)
            for target in [rank_out] if isinstance(rank_out, int) else rank_out or []:
                queues[rank, target].append(output)
            if rank_out is None:
                losses[rank] = loss_of(output)
            position[rank] += 1
        assert position != before, f"{graph} cannot run"
    sum(losses.values(), torch.zeros(())).backward()
    return losses, modules


def check_graph(comm: Communicator, graph: str, num_samples: int = 5) -> None:
    """Losses and gradients equal one process to 1e-12, of both ways to train, and again."""
    inputs = [seeded(rank, num_samples, WIDTH, salt=3) / 10 for rank in range(comm.size)]
    losses, modules = in_one_process(graph, comm.size, inputs)
    expected = [p.grad for m in modules[comm.rank] for p in m.parameters()]
    own_loss = losses.get(comm.rank)
    chain = make_chain(comm, graph)
    for _ in range(2):
        chain.zero_grad()
        output = chain(inputs[comm.rank])
        loss = output if own_loss is None else loss_of(output)
        loss.backward()
        _compare(f"{graph}, forward()", chain, expected, loss, own_loss)
    with torch.no_grad():
        output = chain(inputs[comm.rank])
        _compare(f"{graph}, no_grad", chain, expected, loss_of(output), own_loss)
    for num_microbatches in (3, 8):
        chain = make_chain(comm, graph, num_microbatches=num_microbatches)
        for _ in range(2):
            chain.zero_grad()
            loss = chain.forward_backward(inputs[comm.rank], None, loss_of)
        what = f"{graph}, {num_microbatches} micro-batches"
        require((loss is None) == (own_loss is None), f"{what}: the loss is {loss}")
        _compare(what, chain, expected, loss, own_loss)


def check_changed_shapes(comm: Communicator) -> None:
    """Batches of other sizes than the first, smaller than the number of micro-batches too."""
    chain = make_chain(comm, "cycle", num_microbatches=4)
    for num_samples in (8, 8, 7, 2, 8):
        inputs = [seeded(rank, num_samples, WIDTH, salt=5) / 10 for rank in range(comm.size)]
        losses, modules = in_one_process("cycle", comm.size, inputs)
        chain.zero_grad()
        loss = chain.forward_backward(inputs[comm.rank], None, loss_of)
        expected = [p.grad for m in modules[comm.rank] for p in m.parameters()]
        _compare(f"{num_samples} samples", chain, expected, loss, losses.get(comm.rank))


def check_chains(comm: Communicator) -> None:
    """All of the contracts."""
    for graph in GRAPHS:
        check_graph(comm, graph)
    check_changed_shapes(comm)


def _compare(
    what: str,
    chain: nn.Module,
    expected: Sequence[Tensor | None],
    loss: Tensor | None,
    own_loss: Tensor | None,
) -> None:
    if own_loss is not None and loss is not None:
        require(abs(loss - own_loss) < 1e-12, f"{what}: the loss is {loss} and not {own_loss}")
    for parameter, grad in zip(chain.parameters(), expected, strict=True):
        seen = parameter.grad
        require(seen is not None, f"{what}: no gradient")
        difference = float((seen - grad).abs().max())  # type: ignore[operator]
        require(difference < 1e-12, f"{what}: a gradient differs by {difference}")
