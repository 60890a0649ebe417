"""Whether the kernel has killed a process for lack of memory: its signal is that of ``kill -9``.

The control group of a process counts such kills: ``memory.events`` of version 2,
``memory.oom_control`` of version 1. Linux only.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_GIB = 1 << 30


def count_memory_kills(own: str | None = None, root: Path = _ROOT) -> int | None:
    """How many processes of this one's control group were killed; ``None`` if it is unknown.

    ``own`` is the content of ``/proc/self/cgroup``.
    """
    for folder in _folders(own, root):
        for name in ("memory.events", "memory.oom_control"):
            count = _value_of(folder / name, "oom_kill")
            if count is not None:
                return count
    return None


def describe_sigkill(before: int | None, own: str | None = None, root: Path = _ROOT) -> str:
    """How a process ended by SIGKILL, with the count from before; empty if that is not known."""
    after = count_memory_kills(own, root)
    if before is None or after is None:
        return ""
    if after > before:
        limit = _limit_text(own, root)
        return f"was ended by SIGKILL: the memory limit of its control group{limit} was exceeded"
    return (
        "was ended by SIGKILL, sent by another process: its control group counts no kill for lack "
        "of memory"
    )


def _folders(own: str | None, root: Path) -> list[Path]:
    """Where the control group's files may be: in a container its path may begin elsewhere."""
    if own is None:
        try:
            own = Path("/proc/self/cgroup").read_text()
        except OSError:
            return []
    found = []
    for line in own.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or "memory" in controllers.split(","):
            for mount in (root / controllers, root / "unified"):
                found += [mount / path.lstrip("/"), mount]
    return found


def _limit_text(own: str | None, root: Path) -> str:
    for folder in _folders(own, root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal() and int(text) < 1 << 60:
                return f", {int(text) / _GIB:.3g} GiB,"
    return ""


def _value_of(path: Path, name: str) -> int | None:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(words[1]) for words in lines if words[:1] == [name]), None)
