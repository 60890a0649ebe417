"""A finding: what was seen where, the rule that it breaks, and the cure."""

from collections.abc import Mapping, Sequence
from typing import Literal

from torchmn.cluster.units import grouped
from torchmn.control.codec import Record

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


class Finding(Record, frozen=True):
    """One problem, or with severity ``note`` a fact worth knowing.

    ``hosts`` are those where the cause is, as far as can be seen. ``check`` is the name of the
    check that found it.
    """

    severity: Severity
    hosts: list[str]
    seen: str
    rule: str
    cure: str
    check: str = ""


def deviating(values: Mapping[str, str]) -> tuple[str, dict[str, list[str]]]:
    """The value of most hosts (of the first among equals), and the hosts with another one.

    >>> deviating({"a": "2.1", "b": "2.2", "c": "2.1"})
    ('2.1', {'2.2': ['b']})
    """
    hosts = grouped((value, host) for host, value in values.items())
    usual = max(hosts, key=lambda value: len(hosts[value]), default="")
    return usual, {value: at for value, at in hosts.items() if value != usual}


def worst(findings: Sequence[Finding]) -> Severity:
    """The severity of the worst finding."""
    return min((found.severity for found in findings), key=SEVERITIES.index, default="note")


def listed(names: Sequence[str]) -> str:
    """Up to six names, and how many there are besides."""
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


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
    retransmitted: float = 0.0  # the share of segments that were sent again
    error: str = ""


class Failed(Record, frozen=True):
    """Why an order could not be carried out."""

    text: str


Order = Examine | MeasureLink | AskTime
