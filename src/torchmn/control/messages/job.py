"""Messages between the supervisor of a job and the agents of its ranks."""

from __future__ import annotations

from typing import Literal

from torchmn.control.codec import Record

Stream = Literal["out", "err"]
EndedBy = Literal["itself", "supervisor", "outside"]


class AgentHello(Record, frozen=True, kw_only=True):
    """Agent, to authenticate: its rank and host.

    ``address`` is the address of its host on the route to the supervisor, ``port`` a free port
    there that is reserved until the end, ``versions`` what must be the same on all hosts.
    """

    rank: int
    host: str
    pid: int
    address: str
    port: int
    versions: dict[str, str]


class StartScript(Record, frozen=True, kw_only=True):
    """Supervisor: the command to run; ``env`` holds variables that the launcher has not set.

    ``grace_s`` is how long the script may take to exit when the job fails, ``signal_grace_s`` after
    a signal from outside of the job; ``None`` leaves that to the scheduler.
    """

    argv: list[str]
    cwd: str
    log_dir: str
    grace_s: float
    signal_grace_s: float | None
    wants_refreshes: bool
    script: str
    env: dict[str, str]


class StartRefused(Record, frozen=True, kw_only=True):
    """Agent: the command cannot run on its host, and why."""

    text: str


class ScriptStarted(Record, frozen=True, kw_only=True):
    """Agent: the script's process and cores; ``beside`` names the GPU or memory node near them."""

    pid: int
    cores: list[int]
    num_threads: int
    beside: str = ""


class Output(Record, frozen=True, kw_only=True):
    """Agent: complete lines of the script's output; the supervisor replies with `Shown`."""

    stream: Stream
    lines: list[str]
    num_bytes: int


class Shown(Record, frozen=True, kw_only=True):
    """Supervisor: output of this size has been shown, so that more may be sent."""

    num_bytes: int


class Refresh(Record, frozen=True, kw_only=True):
    """Agent: the current state of a progress bar."""

    text: str


class LogWarning(Record, frozen=True, kw_only=True):
    """Agent: a problem outside the script, which continues."""

    text: str


class Exit(Record, frozen=True, kw_only=True):
    """Agent: the script has exited.

    ``returncode`` is minus the signal if a signal ended it. ``ended_at`` is in seconds since the
    epoch. ``ended_by`` is who ended it: the script itself, the supervisor, or something outside of
    the job, such as mpirun. ``note`` describes the end where the return code is a guess, or not all
    that is known.
    """

    returncode: int
    ended_at: float
    ended_by: EndedBy
    note: str = ""


class Terminate(Record, frozen=True, kw_only=True):
    """Supervisor: send the script this signal, and kill it if it has not exited in time."""

    signum: int


class ForwardSignal(Record, frozen=True, kw_only=True):
    """Supervisor: send the script this signal, which it received from outside of the job.

    After SIGTERM the script is killed if it has not exited in time; it may continue after others.
    """

    signum: int


JobMessage = (
    AgentHello
    | StartScript
    | StartRefused
    | ScriptStarted
    | Output
    | Shown
    | Refresh
    | LogWarning
    | Exit
    | Terminate
    | ForwardSignal
)
