"""The faults: kind, rank and moment, drawn from a seed, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

from chaos.settings import LAUNCHERS, SETTINGS, Setting

Kind = Literal[
    "kill",
    "SIGSTOP",
    "SIGTERM",
    "exception",
    "exit",
    "disk full",
    "network cut",
    "network pause",
    "flipped byte",
    "launcher killed",
    "agent killed",
    "loader killed",
    "out of memory",
    "shm full",
    "no file handles",
    "clock jump",
    "lock",
    "stdout closed",
    "second job",
]
KINDS: tuple[Kind, ...] = (
    *("kill", "kill", "kill", "SIGSTOP", "SIGSTOP", "SIGTERM", "exception", "exit"),
    *("disk full", "network cut", "network pause", "flipped byte", "launcher killed"),
    *("agent killed", "loader killed", "out of memory", "shm full"),
    *("no file handles", "clock jump", "lock", "stdout closed", "second job"),
)
"""All kinds, repeated by their frequency."""
NEEDS: dict[Kind, str] = {
    "network cut": "hosts",
    "network pause": "hosts",
    "disk full": "disks",
    "shm full": "disks",
    "out of memory": "cgroups",
}
"""What this machine must be able to make for a fault."""
MAY_CONTINUE: frozenset[Kind] = frozenset(
    ("disk full", "network pause", "shm full", "no file handles", "stdout closed")
)
MUST_CONTINUE: frozenset[Kind] = frozenset(("clock jump", "second job"))
Moment = Literal["start", "step", "write"]
_INSIDE = ("start", "forward", "backward", "step", "save")
ALL_RANKS = -1
_CLOCK_JUMPS_S = (-86_400, -3600, 3600, 86_400 * 400)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    ``moment``: ``start`` is ``delay_s`` after the start of the rank's script, ``step`` is
    ``delay_s`` after a step of rank 0, ``write`` is ``delay_s`` after the draft of a checkpoint
    appears after that step. ``place`` is where the script raises a fault of its own, ``status`` its
    exit status (negative: by `os._exit`). ``lasts_s`` is how long a disk is full or a network is
    disconnected (None is permanently), or how far the clock jumps. ``is_followed_by_kill``: the
    rank is killed after the message about the full disk.
    """

    kind: Kind
    rank: int
    moment: Moment = "step"
    step: int = 0
    delay_s: float = 0.0
    place: str = ""
    status: int = 0
    lasts_s: float | None = None
    is_followed_by_kill: bool = False

    @property
    def script_fault(self) -> str:
        """The value of the script's ``--fault``; empty if the fault is injected from outside."""
        if self.kind == "exception":
            return f"exception:{self.rank}:{self.step}:{self.place}"
        if self.kind == "second job":
            return f"pause:{ALL_RANKS}:{self.step}:{self.place}"
        if self.kind == "lock":
            return f"lock:{self.rank}:{self.step}:{self.place}"
        if self.kind == "clock jump":
            return f"clock{self.lasts_s:.0f}:{self.rank}:{self.step}:{self.place}"
        if self.kind == "exit":
            kind = f"_exit{-self.status}" if self.status < 0 else f"exit{self.status}"
            return f"{kind}:{self.rank}:{self.step}:{self.place}"
        return ""

    @property
    def when(self) -> str:
        """For records."""
        if self.moment == "start" or self.place == "start":
            return "start"
        return f"{self.place or self.moment} {self.step}"


def draw(seed: int, number: int, available: Container[str]) -> tuple[Setting, Fault]:
    """The setting and the fault of one run; ``available`` of hosts, disks and cgroups."""
    source = random.Random(f"{seed}:{number}")
    kind = source.choice([kind for kind in KINDS if NEEDS.get(kind, "") in ("", *available)])
    setting = _setting_for(kind, source, available)
    return setting, fault_of(kind, setting, source)


def fits(kind: Kind, setting: Setting) -> bool:
    """Whether a job of this setting can have such a fault."""
    if kind.startswith("network"):
        return setting.has_hosts
    if kind in ("disk full", "shm full"):
        return not setting.has_hosts  # which have their own mounts
    if kind == "loader killed":
        return setting.num_loaders > 0
    launchers = {
        "launcher killed": ("torchmn run", "elastic"),
        "agent killed": ("torchmn run",),
    }
    return setting.launcher in launchers.get(kind, LAUNCHERS)


def _setting_for(kind: Kind, source: random.Random, available: Container[str]) -> Setting:
    """Launchers have equal parts of the runs, and settings their shares of those."""
    fitting = [
        setting
        for setting in SETTINGS
        if fits(kind, setting) and ("hosts" in available or not setting.has_hosts)
    ]
    launcher = source.choice(sorted({setting.launcher for setting in fitting}))
    fitting = [setting for setting in fitting if setting.launcher == launcher]
    return source.choices(fitting, [setting.share for setting in fitting])[0]


def fault_of(kind: Kind, setting: Setting, source: random.Random) -> Fault:
    """A fault of this kind at a random moment on a random rank."""
    rank = source.randrange(setting.num_workers)
    num_steps, period_steps = setting.num_steps, setting.period_steps
    step = source.randrange(1, num_steps - 5)
    if kind in ("lock", "clock jump"):
        place = source.choice(_but("start", _INSIDE if kind == "clock jump" else ("step", "save")))
        lasts_s = source.choice(_CLOCK_JUMPS_S) if kind == "clock jump" else None
        step = min(step, num_steps - 2 * period_steps) if place == "save" else step
        return Fault(kind=kind, rank=rank, step=step, place=place, lasts_s=lasts_s)
    if kind in ("exception", "exit"):
        place = source.choice(_INSIDE if kind == "exception" else _but("backward", _INSIDE))
        if place == "start":
            step = 0
        if place == "save":
            step = min(step, num_steps - 2 * period_steps)
        status = source.choice((3, 7, 3, -4, 0)) if kind == "exit" else 0
        return Fault(kind=kind, rank=rank, step=step, place=place, status=status)
    delay_s = source.uniform(0, 0.02)
    if kind == "flipped byte":  # of the newest of two at least
        step = source.randrange(3 * period_steps + 2, num_steps - 5)
        return Fault(kind=kind, rank=rank, step=step, delay_s=delay_s)
    if kind == "disk full":
        lasts_s = source.choice((None, source.uniform(0.2, 2)))
        step = source.randrange(period_steps + 2, num_steps - 3 * period_steps)
        return Fault(
            kind=kind,
            rank=rank,
            step=step,
            delay_s=delay_s,
            lasts_s=lasts_s,
            is_followed_by_kill=source.random() < 0.5,
        )
    lasts_s = source.uniform(0.5, 6) if kind == "network pause" else None
    moments: tuple[Moment, ...] = ("step", "step", "step", "write", "start")
    if kind == "second job":
        return Fault(kind=kind, rank=rank, step=step, place="step")
    if kind in ("loader killed", "agent killed"):
        moments = ("step",)
    if kind in ("no file handles", "shm full"):  # neither while the script is being imported
        moments = ("step", "step", "write")
    moment: Moment = source.choice(moments)
    if moment == "write":
        step, delay_s = min(step, num_steps - 2 * period_steps), source.uniform(0, 0.01)
    if moment == "start":
        step, delay_s = 0, source.uniform(0, 4)
    return Fault(kind=kind, rank=rank, moment=moment, step=step, delay_s=delay_s, lasts_s=lasts_s)


def _but(excluded: str, places: Sequence[str]) -> tuple[str, ...]:
    return tuple(place for place in places if place != excluded)
