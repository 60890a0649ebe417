"""The links of all ranks as one graph, and the order in which each rank runs them.

All ranks know the links of all ranks, so each one computes the same order for all by simulating the
pipeline. An order that a simulation has completed cannot deadlock, as sends do not block.
"""

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from torchmn.base.errors import RankMismatchError, UsageError

FORWARD, BACKWARD = "forward", "backward"
# Duration of a pass in the simulation: backward takes about twice as long as forward.
_SECONDS = {FORWARD: 1, BACKWARD: 2}


@dataclass(frozen=True)
class Link:
    """A module of one rank. ``inputs`` and ``outputs`` are ranks; None: those of the script."""

    rank: int
    index: int
    name: str
    inputs: tuple[int, ...] | None
    outputs: tuple[int, ...] | None

    @property
    def key(self) -> tuple[int, int]:
        """Identifies the link among all: its rank, and its number on that rank."""
        return self.rank, self.index

    def __str__(self) -> str:
        return f"link {self.index} of rank {self.rank} ({self.name})"


@dataclass(frozen=True)
class Edge:
    """A connection: the output of ``source`` is input number ``position`` of ``target``."""

    number: int
    source: Link
    target: Link
    position: int

    @property
    def is_local(self) -> bool:
        """Whether both links are on one rank."""
        return self.source.rank == self.target.rank


@dataclass(frozen=True)
class Action:
    """One pass of a micro-batch through a link."""

    kind: str
    link: Link
    microbatch: int


@dataclass
class ChainGraph:
    """All links, by rank, and the edges between them.

    The k-th output of rank a to rank b is the k-th input of rank b from rank a, in the order of
    `add_link`.

    Raises UsageError, RankMismatchError: the links do not fit together; the same on all ranks.
    """

    links: list[list[Link]]
    edges: list[Edge] = field(init=False)
    incoming: dict[tuple[int, int], list[Edge]] = field(init=False)
    outgoing: dict[tuple[int, int], list[Edge]] = field(init=False)

    def __post_init__(self) -> None:
        for link in self._all:
            self._check_link(link)
        for rank, links in enumerate(self.links):
            last = [link for link in links if link.outputs is None]
            if len(last) > 1:
                raise UsageError(
                    f"{last[0]} and {last[1]} both return their output to the script (rank_out="
                    f"None), but forward() returns one value. Give all links of rank {rank} but "
                    "one a rank_out."
                )
        self.edges = self._connect()
        self.incoming, self.outgoing = defaultdict(list), defaultdict(list)
        for edge in self.edges:
            self.incoming[edge.target.key].append(edge)
            self.outgoing[edge.source.key].append(edge)
        for edges in self.incoming.values():
            edges.sort(key=lambda edge: edge.position)
        self.depths = self._measure_depths()
        """Number of links on the longest path from each link to an end, itself included."""

    @property
    def _all(self) -> list[Link]:
        return [link for links in self.links for link in links]

    def _check_link(self, link: Link) -> None:
        for name, ranks in (("rank_in", link.inputs), ("rank_out", link.outputs)):
            if ranks == ():
                raise UsageError(
                    f"{link} has {name}=[]. Give a rank, a list of ranks, or None for the script."
                )
            for rank in ranks or ():
                if not 0 <= rank < len(self.links):
                    raise UsageError(
                        f"{link} has {name}={rank}, but the communicator has ranks 0 to "
                        f"{len(self.links) - 1}."
                    )

    def _connect(self) -> list[Edge]:
        sources: dict[tuple[int, int], list[Link]] = defaultdict(list)
        targets: dict[tuple[int, int], list[tuple[Link, int]]] = defaultdict(list)
        for link in self._all:
            for rank in link.outputs or ():
                sources[link.rank, rank].append(link)
            for position, rank in enumerate(link.inputs or ()):
                targets[rank, link.rank].append((link, position))
        edges: list[Edge] = []
        for pair in sorted({*sources, *targets}):
            sent, taken = sources[pair], targets[pair]
            if len(sent) != len(taken):
                raise self._mismatch(pair, len(sent), len(taken))
            for source, (target, position) in zip(sent, taken, strict=True):
                edges.append(Edge(len(edges), source, target, position))
        return edges

    def _mismatch(self, pair: tuple[int, int], num_sent: int, num_taken: int) -> RankMismatchError:
        source, target = pair
        links = " ".join(f"The links of rank {rank}: {self._listed(rank)}." for rank in pair)
        return RankMismatchError(
            f"Rank {source} sends {num_sent} outputs to rank {target}, which takes {num_taken}. "
            f"{links} Let rank_out and rank_in of both sides name each other."
        )

    def _listed(self, rank: int) -> str:
        listed = [
            f"{link.index} ({link.name}): rank_in={_plain(link.inputs)}, "
            f"rank_out={_plain(link.outputs)}"
            for link in self.links[rank]
        ]
        return "; ".join(listed) or "none"

    def _measure_depths(self) -> dict[tuple[int, int], int]:
        targets = {
            link.key: [edge.target.key for edge in self.outgoing[link.key]] for link in self._all
        }
        depths: dict[tuple[int, int], int] = {}
        try:
            for key in TopologicalSorter(targets).static_order():
                depths[key] = 1 + max((depths[target] for target in targets[key]), default=0)
        except CycleError as error:
            cycle = [str(self.links[rank][index]) for rank, index in reversed(error.args[1])]
            raise UsageError(f"Links wait for one another: {' sends to '.join(cycle)}.") from None
        return depths

    # ---- order ----

    def order(self, num_microbatches: int, *, has_backward: bool = True) -> list[list[Action]]:
        """The actions of each rank, in order (1F1B).

        A link takes micro-batches in their order, forward and backward. A rank runs each backward
        pass as soon as possible, and a link holds the activations of at most two micro-batches more
        than the number of links that follow it; one of these hides the time of the messages.
        """
        return _Simulation(self, num_microbatches, has_backward).run()


@dataclass
class _Simulation:
    """Simulates all ranks of a pipeline, with messages that take no time."""

    _graph: ChainGraph
    _num_microbatches: int
    _has_backward: bool

    def __post_init__(self) -> None:
        self._started: Counter[tuple[str, tuple[int, int]]] = Counter()
        self._ended: Counter[tuple[str, tuple[int, int]]] = Counter()

    def run(self) -> list[list[Action]]:
        """The order of every rank."""
        graph = self._graph
        orders: list[list[Action]] = [[] for _ in graph.links]
        running: list[tuple[int, int]] = []
        now = 0
        idle = set(range(len(graph.links)))
        while True:
            for rank in sorted(idle):
                action = self._next(rank)
                if action is not None:
                    idle.discard(rank)
                    orders[rank].append(action)
                    self._started[action.kind, action.link.key] += 1
                    heapq.heappush(running, (now + _SECONDS[action.kind], rank))
            if not running:
                return orders
            now = running[0][0]
            while running and running[0][0] == now:
                _, rank = heapq.heappop(running)
                ended = orders[rank][-1]
                self._ended[ended.kind, ended.link.key] += 1
                idle.add(rank)

    def _next(self, rank: int) -> Action | None:
        """The next action of a rank: backward before forward, links near the end first."""
        depths = self._graph.depths
        links = sorted(self._graph.links[rank], key=lambda link: (depths[link.key], link.index))
        for link in links if self._has_backward else ():
            number = self._started[BACKWARD, link.key]
            if number < self._count(FORWARD, link) and all(
                self._count(BACKWARD, edge.target) > number
                for edge in self._graph.outgoing[link.key]
            ):
                return Action(BACKWARD, link, number)
        for link in links:
            number = self._started[FORWARD, link.key]
            # The last link holds the activations of one micro-batch, one before it those of more.
            most = depths[link.key] + (depths[link.key] > 1)
            is_full = self._has_backward and number - self._count(BACKWARD, link) >= most
            if (
                number < self._num_microbatches
                and not is_full
                and all(
                    self._count(FORWARD, edge.source) > number
                    for edge in self._graph.incoming[link.key]
                )
            ):
                return Action(FORWARD, link, number)
        return None

    def _count(self, kind: str, link: Link) -> int:
        return self._ended[kind, link.key]


def _plain(ranks: tuple[int, ...] | None) -> str:
    if ranks is None:
        return "None"
    return str(ranks[0]) if len(ranks) == 1 else str(list(ranks))
