"""Which pairs of hosts are measured at the same time: rounds of pairs that share no machine."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

Pair = tuple[str, str]


def rounds_of(
    hosts: Sequence[str], machines: Mapping[str, Hashable], max_rounds: int | None = None
) -> list[list[Pair]]:
    """Rounds in which no machine takes part twice; together they hold every pair once.

    With ``max_rounds`` only some rounds of a round-robin tournament, in which each host meets this
    number of others. Containers of one machine are measured one pair after another.

    >>> rounds_of(["a", "b", "c", "d"], {name: name for name in "abcd"})
    [[('a', 'd'), ('b', 'c')], [('d', 'c'), ('a', 'b')], [('b', 'd'), ('c', 'a')]]
    """
    rounds = _round_robin(hosts)
    if max_rounds is not None and max_rounds < len(rounds):
        rounds = [rounds[number * len(rounds) // max_rounds] for number in range(max_rounds)]
    return [part for pairs in rounds for part in apart(pairs, machines)]


def apart(pairs: Iterable[Pair], machines: Mapping[str, Hashable]) -> list[list[Pair]]:
    """Divide pairs into rounds in which no machine takes part twice."""
    rounds: list[list[Pair]] = []
    busy: list[set[Hashable]] = []
    for pair in pairs:
        needed = {machines[host] for host in pair}
        number = next((n for n, others in enumerate(busy) if not needed & others), len(rounds))
        if number == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[number].append(pair)
        busy[number] |= needed
    return rounds


def _round_robin(hosts: Sequence[str]) -> list[list[Pair]]:
    """The circle method: the last place stays, the others rotate. An empty place rests."""
    circle: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    size = len(circle)
    rounds = []
    for number in range(size - 1):
        pairs = []
        for place in range(size // 2):
            one, two = circle[place], circle[size - 1 - place]
            if one is not None and two is not None:
                pairs.append((one, two) if (number + place) % 2 == 0 or place else (two, one))
        rounds.append(pairs)
        circle = [circle[-2], *circle[:-2], circle[-1]]
    return rounds
