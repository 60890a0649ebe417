"""Whether the kernel has killed a process for lack of memory: its signal is that of ``kill -9``.

The control group of a process counts such kills: ``memory.events`` of version 2,
``memory.oom_control`` of version 1. Linux only.
"""

from __future__ import annotations

from pathlib import Path

from torchmn.cluster.cpus import control_groups
from torchmn.cluster.memory import memory_limit
from torchmn.cluster.units import GiB

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
