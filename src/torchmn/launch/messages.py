"""What the supervisor and the agents tell each other: a line of JSON per message."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

from torchmn.launch.elastic.messages import ElasticMessage

Stream = Literal["out", "err"]
EndedBy = Literal["itself", "supervisor", "outside"]


@dataclass(frozen=True, kw_only=True)
class Hello:
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
class Present:
    """Sentinel: I watch the script of this rank, this process on this host."""

    rank: int
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """Supervisor: the command to run; ``env`` holds what the launcher has not set itself."""

    argv: list[str]
    cwd: str
    log_dir: str
    grace_s: float
    wants_refreshes: bool
    script: str
    env: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Agent: the command cannot run here, and why."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Started:
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
class Note:
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
class End:
    """Supervisor: pass this signal on to the script, and kill it if it goes on for too long."""

    signum: int


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Supervisor: pass this signal on to the script, which goes on."""

    signum: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Script: I am about to end with this status; ``words`` are the last ones.

    ``is_consequence``: because another rank has ended or does not answer. ``at`` is the time since
    the epoch in seconds.
    """

    status: int
    words: str
    is_consequence: bool
    at: float


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """Script: the end of the program is reached, most likely with this status."""

    status: int


@dataclass(frozen=True, kw_only=True)
class Joining:
    """Script: I join the other ranks, which must have come within the limit."""

    limit_s: float


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Script: all ranks have come."""


@dataclass(frozen=True, kw_only=True)
class Overdue:
    """Script: this collective of this group has not completed in time."""

    group: str
    number: int
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class Tell:
    """Supervisor: what are you doing?"""


@dataclass(frozen=True, kw_only=True)
class Told:
    """Script, or its agent in its place: what it is doing.

    ``collectives`` holds the last one of each group; see `Collective`. ``state`` is the process's
    state in words where the script itself did not answer.
    """

    collectives: list[dict[str, object]] = field(default_factory=list)
    stacks: str = ""
    state: str = ""


Message = (
    Hello
    | Present
    | Run
    | Refused
    | Started
    | Output
    | Refresh
    | Note
    | Exit
    | End
    | Notice
    | Failed
    | Leaving
    | Joining
    | Joined
    | Overdue
    | Tell
    | Told
    | ElasticMessage
)

_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """A message as a line."""
    return json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line. Raises ValueError: it is none of ours."""
    try:
        kind, content = json.loads(line)
        message: Message = _KINDS[kind](**content)
    except (TypeError, KeyError, ValueError, RecursionError):
        raise ValueError(f"No message: {line[:80]!r}") from None
    return message
