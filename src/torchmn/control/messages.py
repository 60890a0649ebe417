"""Messages between the processes of a job.

They are sent between the supervisor and the agents of its ranks, from scripts and agents to the
process that monitors all, and between launcher and hosts of an elastic job.
"""

import functools
import operator
from enum import Enum
from typing import Any, Literal, NamedTuple

from torchmn.control import codec
from torchmn.control.codec import Record, encode

__all__ = ["Message", "decode", "encode"]

Stream = Literal["out", "err"]
EndedBy = Literal["itself", "supervisor", "outside"]


class Message(Record, frozen=True):
    """Base class of all messages. Docstrings of subclasses name the sender first."""


class FromScript(Message, frozen=True):
    """Base class of what a script may send, or its agent in its place; all else is the agent's."""


class AgentHello(Message, frozen=True, kw_only=True):
    """Agent: its rank and host; the identity with which it authenticates.

    ``address`` is the address of its host on the route to the supervisor, ``port`` a free port
    there that stays reserved, and ``versions`` must be the same on all hosts.
    """

    rank: int
    host: str
    pid: int
    address: str
    port: int
    versions: dict[str, str]


class StartScript(Message, frozen=True, kw_only=True):
    """Supervisor: the command to run; ``env`` holds variables that the launcher has not set.

    ``grace_s`` is how long the script may take to exit when the job fails, ``signal_grace_s`` after
    a signal from outside of the job; infinity leaves that to the scheduler. ``preemption`` is where
    the host finds out that it will be preempted, see `torchmn.run.preemption_notice`.
    """

    argv: list[str]
    cwd: str
    log_dir: str
    grace_s: float
    signal_grace_s: float
    wants_refreshes: bool
    script: str
    env: dict[str, str]
    preemption: str = ""


class StartRefused(Message, frozen=True, kw_only=True):
    """Agent: the command cannot run on its host, and why."""

    text: str


class ScriptStarted(Message, frozen=True, kw_only=True):
    """Agent: the script's process and cores; ``beside`` names the GPU or memory node near them."""

    pid: int
    cores: list[int]
    num_threads: int
    beside: str = ""


class Output(Message, frozen=True, kw_only=True):
    """Agent: complete lines of the script's output; the supervisor replies with `Shown`."""

    stream: Stream
    lines: list[str]
    num_bytes: int


class Shown(Message, frozen=True, kw_only=True):
    """Supervisor: output of this size has been shown, so that more may be sent."""

    num_bytes: int


class Refresh(Message, frozen=True, kw_only=True):
    """Agent: the current state of a progress bar."""

    text: str


class AwaitsInput(FromScript, frozen=True, kw_only=True):
    """Script: it begins, or has ended, to wait for a person at the terminal."""

    begins: bool


class LogWarning(Message, frozen=True, kw_only=True):
    """Agent: a problem outside the script, which continues."""

    text: str


class Exit(Message, frozen=True, kw_only=True):
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


class Terminate(Message, frozen=True, kw_only=True):
    """Supervisor: send the script this signal, and kill it if it has not exited in time."""

    signum: int


class ForwardSignal(Message, frozen=True, kw_only=True):
    """Supervisor: send the script this signal, which it received from outside of the job.

    After SIGTERM the script is killed if it has not exited in time; it may continue after others.
    """

    signum: int


class PreemptionNotice(Message, frozen=True, kw_only=True):
    """Agent, to its script and to the supervisor: the host will be preempted.

    ``text`` says by whom and when, as far as known.
    """

    text: str


# ---- failures and hangs ------------------------------------------------------------------


class ProcessState(Enum):
    """State of a process: its value, its letters in Linux' ``/proc``, and how it is described."""

    _value_: str
    letters: str
    text: str
    RUNNING = "running", "R", "runs"
    SLEEPING = "sleeping", "S", "sleeps"
    DEVICE_WAIT = "device_wait", "D", "waits for a disk or another device"
    STOPPED = "stopped", "T", "is stopped by a signal"
    TRACED = "traced", "t", "is stopped by a debugger"
    EXITED = "exited", "ZX", "has exited"
    GONE = "gone", "", "is gone"
    UNKNOWN = "unknown", "", "cannot be inspected on this system"

    def __new__(cls, value: str, letters: str, text: str) -> "ProcessState":
        """Make a state from a row of the table above, of which only its value is sent."""
        state = object.__new__(cls)
        state._value_, state.letters, state.text = value, letters, text
        return state

    @property
    def is_halted(self) -> bool:
        """Whether the process will not continue without outside help."""
        return self not in (ProcessState.RUNNING, ProcessState.SLEEPING, ProcessState.UNKNOWN)


class MonitorHello(Message, frozen=True, kw_only=True):
    """Rank monitor: its script's rank, host and process; the identity when it authenticates.

    ``monitor_pid`` is the monitor's own process.
    """

    rank: int
    host: str
    pid: int
    monitor_pid: int


class Failed(FromScript, frozen=True, kw_only=True):
    """Script: an error ends it with this exit status. ``traceback`` is the text for the terminal.

    ``error`` is the type and the message of the error, which may have several lines.
    ``is_consequence``: the error only reports that another rank has ended or does not answer.
    ``at`` is in seconds since the epoch. ``whole`` is the traceback with all frames, empty if the
    script may continue; unless ``is_shown`` the script has not printed it: the agent writes it to
    the rank's log.
    """

    status: int
    traceback: str
    error: str
    is_consequence: bool
    at: float
    whole: str = ""
    is_shown: bool = True


class Leaving(FromScript, frozen=True, kw_only=True):
    """Script: it has reached its end and will probably exit with this status.

    ``text`` is what it has not printed: that of ``sys.exit("text")``, or the traceback of a
    KeyboardInterrupt, with ``status`` 0. The agent writes it to the rank's log.
    """

    status: int
    text: str = ""


class Joining(FromScript, frozen=True, kw_only=True):
    """Script: it begins to join the other ranks, which must all arrive within the limit."""

    limit_s: float


class Joined(FromScript, frozen=True):
    """Script: all ranks have joined."""


class Overdue(FromScript, frozen=True, kw_only=True):
    """Script: this collective of this group has not completed within its time limit."""

    group: str
    number: int
    limit_s: float


class CollectiveStatus(Record, frozen=True, kw_only=True):
    """A collective of one group on one rank; ``ranks`` is empty for all of the job.

    ``where`` names the bucket and the step, and ``call`` the call of the script, if known;
    ``state`` is ``"done"`` once it is complete. It began ``age_s`` ago and took, or has taken,
    ``seconds``.
    """

    group: str
    number: int
    ranks: tuple[int, ...] = ()
    what: str = "a collective"
    where: str = ""
    call: str = ""
    state: str = ""
    age_s: float = 0.0
    seconds: float = 0.0

    @property
    def described(self) -> str:
        """What it is, with its bucket, its step and the call of the script."""
        return ", ".join(filter(None, (self.what, self.where, self.call)))


class EngineStatus(Record, frozen=True, kw_only=True):
    """The engine of one communicator: ``ranks`` is empty for all of the job.

    ``num_on_device`` exchanges are queued on a GPU, whose end the host does not wait for.
    """

    ranks: tuple[int, ...] = ()
    is_running: bool
    num_queued: int
    num_on_device: int


class CheckpointSaved(FromScript, frozen=True, kw_only=True):
    """Script of rank 0: all ranks have finished the checkpoint of this step.

    The launcher of an elastic job passes it on to the rendezvous.
    """

    step: int


class StatusRequest(Message, frozen=True, kw_only=True):
    """Supervisor: requests a `StatusReply` from every rank.

    After ``limit_s`` the agent replies in place of a script that has not. The reply has up to
    ``num_recent`` of the last collectives of each communicator.
    """

    limit_s: float
    num_recent: int = 0


class StatusReply(FromScript, frozen=True, kw_only=True):
    """Script, or its agent in its place: what the rank is doing.

    If the script did not answer, ``process`` is the state of its process, and ``kernel_function``
    the kernel function in which it waits, if known. ``script_stack`` has the frames of ``stacks``
    that belong to the script's own code. ``has_ended``: the script has reached its end.
    ``awaits_input``: it waits for a person at the terminal.
    ``device_nbytes`` is what the record of the run last measured, None without a record.
    """

    collectives: tuple[CollectiveStatus, ...] = ()
    recent: tuple[CollectiveStatus, ...] = ()
    engines: tuple[EngineStatus, ...] = ()
    rss_nbytes: int = 0
    device_nbytes: int | None = None
    stacks: str = ""
    script_stack: str = ""
    process: ProcessState | None = None
    kernel_function: str = ""
    has_ended: bool = False
    awaits_input: bool = False


class InspectRequest(Message, frozen=True):
    """`torchmn inspect`: the identity when it authenticates; the answer is an `Inspection`."""


class RankState(Record, frozen=True, kw_only=True):
    """What one rank does. ``text`` describes a rank that did not reply, else it is empty."""

    rank: int
    host: str
    pid: int
    text: str
    reply: StatusReply | None


class Inspection(Message, frozen=True, kw_only=True):
    """Supervisor: what all ranks do, some ``seconds`` after the job began."""

    log_dir: str
    host: str
    seconds: float
    ranks: tuple[RankState, ...]


class HeartbeatRequest(Message, frozen=True):
    """Requests an `Alive`: either side of a connection may ask."""


class StoppedProcess(NamedTuple):
    """A process that a signal has stopped, and its program."""

    pid: int
    name: str


class Alive(Message, frozen=True, kw_only=True):
    """The answer to a `HeartbeatRequest`; ``stopped`` are processes near the one that answers."""

    stopped: list[StoppedProcess]


# ---- elastic jobs: hosts authenticate to the launcher with `HostHello` -------------------


class HostHello(Message, frozen=True, kw_only=True):
    """Host: it offers ``slots`` ranks; the identity with which it authenticates.

    ``node_rank`` is its place among the hosts if the user has given one. ``command`` is what the
    user has started there, as of `common_command`; None on a host that the launcher has started.
    """

    host: str
    slots: int
    versions: dict[str, str]
    node_rank: int | None = None
    command: str | None = None

    @property
    def joins(self) -> bool:
        """Whether the user has started it there, and not the launcher."""
        return self.command is not None


class JobOrder(Message, frozen=True, kw_only=True):
    """Launcher: what a host that has connected needs to know of the job.

    It replies with `HostReady`, or with `HostLeaving` if it cannot take part. ``env`` holds
    variables for its agents. It is sent unencrypted, so it has none that the user has set.
    ``signal_grace_s`` is as in `StartScript`, ``preemption`` as in `torchmn.run.job.Job`.
    """

    cwd: str
    script: str
    grace_s: float
    signal_grace_s: float
    preemption: str
    env: dict[str, str]


class HostReady(Message, frozen=True):
    """Host: no agent runs on it; it waits for the next round."""


class HostLeaving(Message, frozen=True, kw_only=True):
    """Host: it will leave the job, and why."""

    text: str


class HostFinished(Message, frozen=True):
    """Host: all its agents have exited with status 0."""


class Restart(Message, frozen=True):
    """Launcher: end the agents and wait for the next round."""


class RoundMember(Record, frozen=True, kw_only=True):
    """A host that takes part in a round; see `HostHello`."""

    host: str
    slots: int


class Round(Message, frozen=True, kw_only=True):
    """Launcher: start a round of these hosts, in the order of their ranks.

    ``reason`` says why the previous round ended.
    """

    number: int
    members: list[RoundMember]
    num_restarts: int
    reason: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Launcher: the job is over, or continues without this host; end the agents."""

    signum: int
    text: str


def _kinds(base: type[Message]) -> list[type[Message]]:
    """Return the subclasses that have no subclasses."""
    # Base classes are never sent.
    return [kind for each in base.__subclasses__() for kind in _kinds(each)] or [base]


_ANY: Any = functools.reduce(operator.or_, _kinds(Message))


def decode(line: bytes) -> Message:
    """Decode a line into a message. Raises ValueError: it is not a message."""
    message: Message = codec.decode_union(line, _ANY)
    return message
