"""The faults: kind, rank and moment, drawn from a seed, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from chaos.settings import SETTINGS, Setting

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
]
KINDS: tuple[Kind, ...] = (
    *("kill", "kill", "kill", "SIGSTOP", "SIGSTOP", "SIGTERM", "exception", "exit"),
    *("disk full", "network cut", "network pause", "flipped byte", "launcher killed"),
)
"""All kinds, repeated by their frequency."""
Moment = Literal["start", "step", "write"]
_INSIDE = ("start", "forward", "backward", "step", "save")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    ``moment``: ``start`` is ``delay_s`` after the start of the rank's script, ``step`` is
    ``delay_s`` after a step of rank 0, ``write`` is ``delay_s`` after the draft of a checkpoint
    appears after that step. ``place`` is where the script raises a fault of its own, ``status`` its
    exit status (negative: by `os._exit`). ``lasts_s`` is how long a disk is full or a network is
    disconnected; None is permanently. ``is_followed_by_kill``: the rank is killed after the message
    about the full disk.
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


def draw(seed: int, number: int, *, has_hosts: bool, has_disks: bool) -> tuple[Setting, Fault]:
    """The setting and the fault of one run, from those that this machine supports."""
    source = random.Random(f"{seed}:{number}")
    kinds = [
        kind
        for kind in KINDS
        if (has_hosts or not kind.startswith("network")) and (has_disks or kind != "disk full")
    ]
    kind = source.choice(kinds)
    setting = _setting_for(kind, source, has_hosts=has_hosts)
    return setting, fault_of(kind, setting, source)


def _setting_for(kind: Kind, source: random.Random, *, has_hosts: bool) -> Setting:
    def fits(setting: Setting) -> bool:
        if setting.has_hosts and not has_hosts:
            return False
        if kind.startswith("network"):
            return setting.has_hosts
        if kind == "disk full":
            return not setting.has_hosts  # which have their own mounts
        return kind != "launcher killed" or setting.launcher == "torchmn run"

    fitting = [setting for setting in SETTINGS if fits(setting)]
    return source.choices(fitting, [setting.share for setting in fitting])[0]


def fault_of(kind: Kind, setting: Setting, source: random.Random) -> Fault:
    """A fault of this kind at a random moment on a random rank."""
    rank = source.randrange(setting.num_workers)
    num_steps, period_steps = setting.num_steps, setting.period_steps
    step = source.randrange(1, num_steps - 5)
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
    moment: Moment = source.choice(("step", "step", "step", "write", "start"))
    if moment == "write":
        step, delay_s = min(step, num_steps - 2 * period_steps), source.uniform(0, 0.01)
    if moment == "start":
        step, delay_s = 0, source.uniform(0, 4)
    return Fault(kind=kind, rank=rank, moment=moment, step=step, delay_s=delay_s, lasts_s=lasts_s)


def _but(excluded: str, places: Sequence[str]) -> tuple[str, ...]:
    return tuple(place for place in places if place != excluded)
