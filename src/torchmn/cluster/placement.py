"""The placement of ranks on nodes, by host name as in ChainerMN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torchmn.base.errors import UsageError
from torchmn.cluster.units import grouped


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """The placement of one rank.

    ``intra_rank`` is its number among the ranks of its node in ascending order, ``inter_rank`` the
    number of its node in the order of first ranks.

    Example:
        >>> place = Topology.blocks([2, 2]).place(3)
        >>> place.intra_rank, place.inter_rank
        (1, 1)
    """

    rank: int
    size: int
    intra_rank: int
    intra_size: int
    inter_rank: int
    inter_size: int


@dataclass(frozen=True)
class Topology:
    """The host name of every rank, in rank order, and the placement that follows from it.

    The rule is ChainerMN's ``init_ranks``: ranks with the same host name share a node, and no
    order of placement (block, cyclic, uneven) is assumed.

    >>> Topology(("a", "b", "a")).place(2).intra_rank
    1
    """

    hosts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.hosts:
            raise UsageError("A topology needs at least one host, got none.")

    @classmethod
    def blocks(cls, ranks_per_node: Sequence[int]) -> Topology:
        """Make a topology of ``node0``, ``node1``, ... with these numbers of consecutive ranks."""
        hosts = (f"node{i}" for i, count in enumerate(ranks_per_node) for _ in range(count))
        return cls(tuple(hosts))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every node in ascending order; nodes in the order of their first rank."""
        ranks_of = grouped((host, rank) for rank, host in enumerate(self.hosts))
        return tuple(map(tuple, ranks_of.values()))

    @property
    def is_balanced(self) -> bool:
        """Whether every node has the same number of ranks."""
        return len({len(ranks) for ranks in self.nodes}) == 1

    def place(self, rank: int) -> RankPlacement:
        """Return the placement of one rank. Raises UsageError: no such rank."""
        if not 0 <= rank < self.size:
            raise UsageError(f"Rank {rank} is outside 0..{self.size - 1}.")
        inter_rank, ranks = next((i, r) for i, r in enumerate(self.nodes) if rank in r)
        return RankPlacement(
            rank=rank,
            size=self.size,
            intra_rank=ranks.index(rank),
            intra_size=len(ranks),
            inter_rank=inter_rank,
            inter_size=len(self.nodes),
        )

    def subset(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of a group of these ranks, in this order."""
        return Topology(tuple(self.hosts[rank] for rank in ranks))

    def __str__(self) -> str:
        return f"{self.size} ranks on {len(self.nodes)} nodes ({[len(n) for n in self.nodes]})"
