"""Findings (what was seen where, the rule that it breaks, the cure), orders and replies."""

from collections.abc import Mapping, Sequence
from typing import Literal

from torchmn.cluster.units import grouped
from torchmn.control.codec import Record

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


class Finding(Record, frozen=True):
    """One problem, or with severity ``note`` a fact worth knowing.

    ``hosts`` are the hosts where the cause probably is. ``check`` is the name of the check that
    found it.
    """

    severity: Severity
    hosts: list[str]
    seen: str
    rule: str
    cure: str
    check: str = ""


def deviating(values: Mapping[str, str]) -> tuple[str, dict[str, list[str]]]:
    """Return the most frequent value (the first of equals), and the hosts with other values.

    >>> deviating({"a": "2.1", "b": "2.2", "c": "2.1"})
    ('2.1', {'2.2': ['b']})
    """
    hosts = grouped((value, host) for host, value in values.items())
    usual = max(hosts, key=lambda value: len(hosts[value]), default="")
    return usual, {value: at for value, at in hosts.items() if value != usual}


def worst(findings: Sequence[Finding]) -> Severity:
    """Return the severity of the worst finding."""
    return min((found.severity for found in findings), key=SEVERITIES.index, default="note")


def listed(names: Sequence[str]) -> str:
    """Join up to six names, and the number of others."""
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


class Request(Record, frozen=True, kw_only=True):
    """The request of an examination. ``slots`` has the number of ranks by host, in order.

    ``paths`` are folders for data and checkpoints. ``expected_bytes_per_s`` is the network's speed
    according to the user, for adapters that report none or a wrong one; 0 if not given.
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
        """Number of ranks on all hosts."""
        return sum(self.slots.values())


class Begin(Record, frozen=True, kw_only=True):
    """The first order: the name of the program's host, and the secret of this examination."""

    host: str
    secret: str
    request: Request


class Examine(Record, frozen=True, kw_only=True):
    """Order: make the local part of a check, and reply with its facts."""

    check: str


class MeasureLink(Record, frozen=True, kw_only=True):
    """Order: measure the link to an address of another host for this time."""

    address: str
    port: int
    seconds: float


class AskTime(Record, frozen=True):
    """Order: reply with the time of the host's clock."""


class Ready(Record, frozen=True, kw_only=True):
    """Reply: the program has started. Hosts with the same ``machine`` share its cores."""

    machine: str
    port: int


class TimeIs(Record, frozen=True):
    """Reply: seconds since 1970 by the host's clock."""

    unix_s: float


class LinkMeasured(Record, frozen=True, kw_only=True):
    """Reply: the link to another host in one direction, or why it could not be measured."""

    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    retransmitted: float = 0.0  # the share of segments that were sent again
    error: str = ""


class Failed(Record, frozen=True):
    """Reply: the reason why an order could not be carried out."""

    text: str


Order = Examine | MeasureLink | AskTime
