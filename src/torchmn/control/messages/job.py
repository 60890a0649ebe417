"""What the supervisor and the agents tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stream = Literal["out", "err"]
EndedBy = Literal["itself", "supervisor", "outside"]


@dataclass(frozen=True, kw_only=True)
class AgentHello:
    """Agent, at the gate: who I am.

    ``address`` is the one of its host that the supervisor is reached from, ``port`` a free port
    there that is kept until the end, ``versions`` what must be the same on all hosts.
    """

    rank: int
    host: str
    pid: int
    address: str
    port: int
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class StartScript:
    """Supervisor: the command to run; ``env`` holds what the launcher has not set itself."""

    argv: list[str]
    cwd: str
    log_dir: str
    grace_s: float
    wants_refreshes: bool
    script: str
    env: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class StartRefused:
    """Agent: the command cannot run here, and why."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ScriptStarted:
    """Agent: the script runs as this process, on these cores, ``beside`` a GPU or memory node."""

    pid: int
    cores: list[int]
    num_threads: int
    beside: str = ""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Agent: whole lines."""

    stream: Stream
    lines: list[str]


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """Agent: what a progress bar shows now."""

    text: str


@dataclass(frozen=True, kw_only=True)
class LogWarning:
    """Agent: something went wrong beside the script, which goes on."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Exit:
    """Agent: the script has ended. ``returncode`` is minus the signal if one ended it.

    ``ended_at`` is the time since the epoch in seconds. ``ended_by`` says who asked it to end:
    nobody, the supervisor, or somebody else, such as mpirun. ``note`` says how in words where the
    code is a guess.
    """

    returncode: int
    ended_at: float
    ended_by: EndedBy
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Terminate:
    """Supervisor: pass this signal on to the script, and kill it if it goes on for too long."""

    signum: int


@dataclass(frozen=True, kw_only=True)
class ForwardSignal:
    """Supervisor: pass this signal on to the script, which goes on."""

    signum: int


JobMessage = (
    AgentHello
    | StartScript
    | StartRefused
    | ScriptStarted
    | Output
    | Refresh
    | LogWarning
    | Exit
    | Terminate
    | ForwardSignal
)
