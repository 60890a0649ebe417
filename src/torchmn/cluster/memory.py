"""How much memory this host has, and how much of it this process may use. Reads, never changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchmn.cluster.cpus import control_groups
from torchmn.cluster.units import GiB, KiB

_NO_LIMIT = 1 << 60
"""Version 1 writes a number near this where there is no limit."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """In bytes. ``limit`` is the least one of this process's control groups, or ``None``."""

    total: int
    available: int
    limit: int | None = None


def memory_of_host(root: Path = Path("/")) -> Memory:
    """What ``/proc/meminfo`` and the control groups report; 0 where they do not. Local."""
    values = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        values[name] = int(number[0]) * KiB if number and number[0].isdecimal() else 0
    return Memory(
        total=values.get("MemTotal", 0),
        available=values.get("MemAvailable", 0),
        limit=memory_limit(root),
    )


def memory_limit(root: Path = Path("/")) -> int | None:
    """The least memory limit of this process's control groups in bytes, or ``None``. Local."""
    limits = []
    for folder in control_groups("memory", root):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            text = _text(folder / name).strip()
            if text.isdecimal() and int(text) < _NO_LIMIT:
                limits.append(int(text))
    return min(limits, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# Whether the kernel has killed a process for lack of memory: its signal is that of ``kill -9``.
#
# The control group of a process counts such kills: ``memory.events`` of version 2,
# ``memory.oom_control`` of version 1. Linux only.

_ROOT = Path("/")


def count_memory_kills(root: Path = _ROOT) -> int | None:
    """How many processes of this one's control group were killed; ``None`` if it is unknown."""
    for folder in control_groups("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            count = _value_of(folder / name, "oom_kill")
            if count is not None:
                return count
    return None


def describe_sigkill(before: int | None, root: Path = _ROOT) -> str:
    """How a process ended by SIGKILL, with the count from before; empty if that is not known."""
    after = count_memory_kills(root)
    if before is None or after is None:
        return ""
    if after > before:
        limit = memory_limit(root)
        size = "" if limit is None else f", {limit / GiB:.3g} GiB,"
        return f"was ended by SIGKILL: the memory limit of its control group{size} was exceeded"
    return (
        "was ended by SIGKILL, sent by another process: its control group counts no kill for lack "
        "of memory"
    )


def _value_of(path: Path, name: str) -> int | None:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(words[1]) for words in lines if words[:1] == [name]), None)
