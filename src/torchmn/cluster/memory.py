"""How much memory this host has, and how much of it this process may use. Reads, never changes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torchmn.cluster.cpus import control_groups
from torchmn.cluster.gpus import text_of
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
    for line in text_of(root / "proc/meminfo").splitlines():
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
            text = text_of(folder / name)
            if text.isdecimal() and int(text) < _NO_LIMIT:
                limits.append(int(text))
    return min(limits, default=None)


def count_memory_kills(root: Path = Path("/")) -> int | None:
    """How many processes of this one's control group were killed for lack of memory.

    ``None`` if it is unknown. The signal is that of ``kill -9``. Version 2 counts such kills in
    ``memory.events``, version 1 in ``memory.oom_control``. Linux only.
    """
    for folder in control_groups("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            if count := re.search(r"^oom_kill (\d+)", text_of(folder / name), re.MULTILINE):
                return int(count[1])
    return None


def describe_sigkill(before: int | None, root: Path = Path("/")) -> str:
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
