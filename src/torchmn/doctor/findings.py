"""A finding: what was seen where, the rule that it breaks, and the cure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torchmn.control.codec import Record

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


class Finding(Record, frozen=True, kw_only=True):
    """One problem, or with severity ``note`` a fact worth knowing.

    ``hosts`` are those where the cause is, as far as can be seen. ``value`` is the number in
    ``seen``, in ``unit``.
    """

    check: str
    severity: Severity
    hosts: list[str]
    seen: str
    rule: str
    cure: str
    value: float | None = None
    unit: str = ""


def deviating(values: Mapping[str, str]) -> tuple[str, dict[str, list[str]]]:
    """The value of most hosts (of the first among equals), and the hosts with another one.

    >>> deviating({"a": "2.1", "b": "2.2", "c": "2.1"})
    ('2.1', {'2.2': ['b']})
    """
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    usual = max(hosts, key=lambda value: len(hosts[value]), default="")
    return usual, {value: at for value, at in hosts.items() if value != usual}


def worst(findings: Sequence[Finding]) -> Severity:
    """The severity of the worst finding."""
    return min((found.severity for found in findings), key=SEVERITIES.index, default="note")


def listed(names: Sequence[str]) -> str:
    """Up to six names, and how many there are besides."""
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
