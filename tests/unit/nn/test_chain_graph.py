"""The graph of a chain and its orders, without communication."""

from collections import defaultdict

import pytest

from torchmn.errors import RankMismatchError, UsageError
from torchmn.nn.chain_graph import BACKWARD, FORWARD, Action, ChainGraph, Link


def line(num_ranks: int) -> ChainGraph:
    return graph(
        *([(r - 1 if r else None, r + 1 if r < num_ranks - 1 else None)] for r in range(num_ranks))
    )


def graph(
    *links_of_ranks: list[tuple[int | list[int] | None, int | list[int] | None]],
) -> ChainGraph:
    def ranks(value: int | list[int] | None) -> tuple[int, ...] | None:
        return None if value is None else (value,) if isinstance(value, int) else tuple(value)

    return ChainGraph(
        [
            [
                Link(rank, i, f"Part, model.py:{i}", ranks(a), ranks(b))
                for i, (a, b) in enumerate(ls)
            ]
            for rank, ls in enumerate(links_of_ranks)
        ]
    )


def shown(actions: list[Action]) -> str:
    return " ".join(f"{'F' if a.kind == FORWARD else 'B'}{a.microbatch}" for a in actions)


def test_1f1b_alternates() -> None:
    first, second = line(2).order(5)
    assert shown(first) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert shown(second) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


def test_forward_alone() -> None:
    for actions in line(3).order(2, has_backward=False):
        assert shown(actions) == "F0 F1"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_1f1b_keeps_the_activations_of_few(num_ranks: int) -> None:
    chain = line(num_ranks)
    for rank, actions in enumerate(chain.order(32)):
        held = most = 0
        for action in actions:
            held += 1 if action.kind == FORWARD else -1
            most = max(most, held)
        after = num_ranks - 1 - rank
        assert most == (after + 2 if after else 1)


def test_a_rank_waits_only_while_the_pipeline_fills_and_drains() -> None:
    """With passes of 1 and 2 units a step takes 3 (m + n - 1) of them."""
    num_ranks, num = 4, 8
    chain = line(num_ranks)
    orders = chain.order(num)
    ended: dict[tuple[str, int, int], int] = {}
    clock = [0] * num_ranks
    position = [0] * num_ranks
    while any(position[r] < 2 * num for r in range(num_ranks)):
        for rank in range(num_ranks):
            if position[rank] == 2 * num:
                continue
            action = orders[rank][position[rank]]
            step = 1 if action.kind == BACKWARD else -1
            needed = (action.kind, rank + step, action.microbatch)
            if 0 <= rank + step < num_ranks and needed not in ended:
                continue
            begin = max(clock[rank], ended.get(needed, 0))
            clock[rank] = begin + (2 if action.kind == BACKWARD else 1)
            ended[action.kind, rank, action.microbatch] = clock[rank]
            position[rank] += 1
    assert max(clock) == 3 * (num + num_ranks - 1)


def test_a_link_takes_micro_batches_in_order() -> None:
    chain = graph([(None, 1), (1, None)], [(0, 0)])
    for actions in chain.order(6):
        seen = defaultdict(list)
        for action in actions:
            seen[action.kind, action.link.index].append(action.microbatch)
        assert all(numbers == [*range(6)] for numbers in seen.values())


def test_an_output_that_no_link_takes() -> None:
    with pytest.raises(RankMismatchError) as caught:
        graph([(None, 1)], [(None, None)])
    assert str(caught.value).startswith(
        "Rank 0 sends 1 outputs to rank 1, which takes 0. The links of rank 0: 0 (Part, "
        "model.py:0): rank_in=None, rank_out=1. The links of rank 1: 0 (Part, model.py:0): "
        "rank_in=None, rank_out=None."
    )


def test_an_input_that_no_link_sends() -> None:
    with pytest.raises(
        RankMismatchError, match=r"sends 0 outputs to rank 1, which takes 1.*: none"
    ):
        graph([], [(0, None)])


def test_two_outputs_of_a_rank() -> None:
    with pytest.raises(
        UsageError, match=r"link 0 of rank 0 .* and link 1 of rank 0 .* both return"
    ):
        graph([(None, None), (None, None)])


def test_links_that_wait_for_one_another() -> None:
    with pytest.raises(UsageError, match="wait for one another: link 0 of rank 0 .* sends to link"):
        graph([(1, 1)], [(0, 0)])


@pytest.mark.parametrize(
    ("rank_in", "cause"), [(2, "rank_in=2, but the communicator has ranks 0 to 0"), ([], "=\\[\\]")]
)
def test_ranks_that_do_not_exist(rank_in: int | list[int], cause: str) -> None:
    with pytest.raises(UsageError, match=cause):
        graph([(rank_in, None)])
