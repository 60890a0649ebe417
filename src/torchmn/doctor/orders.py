"""What the launcher and the program on a host send each other, a line each."""

from __future__ import annotations

from torchmn.control.codec import Record


class Request(Record, frozen=True, kw_only=True):
    """What is to be examined. ``slots`` holds the hosts, in order, with their numbers of ranks.

    ``paths`` are folders for data and checkpoints. ``expected_bytes_per_s`` is what the user knows
    of the network where adapters report no speed, or a wrong one; 0 if it was not given.
    """

    slots: dict[str, int]
    cwd: str
    paths: list[str] = []
    is_full: bool = False
    expected_bytes_per_s: float = 0.0

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts."""
        return list(self.slots)

    @property
    def num_ranks(self) -> int:
        """Ranks on all hosts."""
        return sum(self.slots.values())


class Begin(Record, frozen=True, kw_only=True):
    """The first order: the host that the program is on, and the secret of this examination."""

    host: str
    secret: str
    request: Request


class Examine(Record, frozen=True, kw_only=True):
    """Make the part of a check that is local; its facts are the reply."""

    check: str


class MeasureLink(Record, frozen=True, kw_only=True):
    """Measure the link to another host, by an address of it, for this time."""

    address: str
    port: int
    seconds: float


class AskTime(Record, frozen=True):
    """What time is it on the host?"""


class Ready(Record, frozen=True, kw_only=True):
    """The program has started. Hosts that share a ``machine`` share its cores."""

    machine: str
    port: int


class TimeIs(Record, frozen=True):
    """Seconds since 1970 on the host."""

    unix_s: float


class LinkMeasured(Record, frozen=True, kw_only=True):
    """The link to another host in one direction, or why it could not be measured."""

    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    retransmitted: float = 0.0
    """The share of segments that were sent again."""
    error: str = ""


class Failed(Record, frozen=True):
    """Why an order could not be carried out."""

    text: str


Order = Examine | MeasureLink | AskTime
