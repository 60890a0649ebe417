"""How much memory this host has, and how much of it this process may use. Reads, never changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchmn.cluster.cpus import control_groups
from torchmn.cluster.units import KiB

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
