"""A job: the command to run, its hosts, and how to start it."""

import math
import os
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from torchmn.base.errors import UsageError
from torchmn.cluster.hostlists import Host
from torchmn.control.processes import python_module, signal_name
from torchmn.run.elastic.rendezvous_state import Limits

Backend = Literal["gloo", "nccl", "mpi"]
Launcher = Literal["local", "mpirun", "srun", "ssh"]

THIS_HOST = "localhost"

FAILURE_GRACE_S = 5.0
# How long ranks may take to exit: when the job fails, and after SIGTERM from outside of it.
SIGNAL_GRACE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command, run as ``num_ranks`` processes, ranks counted along the hosts.

    ``argv`` is the command of every rank and ``script`` the file in it that every host must see.
    The slots of ``hosts`` are the numbers of ranks on them. ``exported`` names variables that go to
    all hosts, and ``launcher_args`` are passed verbatim to the launcher. When the job fails, the
    time between asking a rank to end and killing it is ``grace_s``; after SIGTERM from outside it
    is ``signal_grace_s``, infinite to leave that to the scheduler. Each run makes a folder of its
    own in ``log_dir``, where the newest ``keep_logs`` stay, None for all. The output of the local
    ranks in ``shown`` is shown, None for all. ``warning`` is what the launcher says besides its
    first line, if anything. ``preemption`` is where hosts find out that they will be preempted, see
    `torchmn.run.preemption_notice`. What the terminal shows of a failure is also written to
    ``report``, if that is given.

    With ``limits`` the job is elastic: its hosts may be lost and come back, and join at the address
    and port ``meeting``, where the launcher's own host has this ``node_rank``; without ``meeting``
    only ``hosts`` take part.

    >>> from torchmn.run.plan import RunOptions, plan_job
    >>> job, _ = plan_job(RunOptions(argv=("python", "train.py"), num_ranks=2), {})
    >>> job.argv
    ('python', 'train.py')
    """

    argv: tuple[str, ...]
    num_ranks: int
    backend: Backend
    log_dir: Path
    launcher: Launcher = "local"
    script: str = ""
    hosts: tuple[Host, ...] = ()
    exported: tuple[str, ...] = ()
    launcher_args: tuple[str, ...] = ()
    cwd: Path = field(default_factory=Path.cwd)
    # Not in tracebacks and logs, which show the job.
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    grace_s: float = FAILURE_GRACE_S
    signal_grace_s: float = SIGNAL_GRACE_S
    shown: frozenset[int] | None = None
    warning: str = ""
    preemption: str = ""
    keep_logs: int | None = None
    report: Path | None = None
    limits: Limits | None = None
    meeting: tuple[str, int] | None = None
    node_rank: int = 0

    def __post_init__(self) -> None:
        if self.keep_logs is not None and self.keep_logs < 1:
            raise UsageError(f"--keep-logs must be at least 1, got {self.keep_logs}.")
        if self.num_ranks < 1:
            raise UsageError(f"-n must be at least 1, got {self.num_ranks}.")
        if not 0 <= self.grace_s < float("inf"):
            raise UsageError(f"--grace must be 0 or more seconds, got {self.grace_s}.")
        if not self.argv:
            raise UsageError("A job needs a command, got none.")
        if not self.hosts:
            object.__setattr__(self, "hosts", (Host(name=THIS_HOST, slots=self.num_ranks),))

    @property
    def has_other_hosts(self) -> bool:
        """Whether any host is not this one (`THIS_HOST`)."""
        return any(host.name != THIS_HOST for host in self.hosts)

    def ranks_on(self, inter_rank: int) -> range:
        """The ranks on the host with this index in `hosts`."""
        first = sum(host.slots for host in self.hosts[:inter_rank])
        return range(first, first + self.hosts[inter_rank].slots)


@dataclass(frozen=True)
class Command:
    """A process for the supervisor to start: the agent of one rank, or a launcher of several.

    ``ranks`` are the ranks that it starts, None for all of the job; ``stdin`` is written to its
    standard input.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    name: str = "the agent"
    ranks: range | None = None
    stdin: bytes = field(default=b"", repr=False)


def time_to_save(signum: int, grace_s: float) -> str:
    """Return what the user is told when the ranks may save and exit after a signal.

    >>> time_to_save(15, 30.0)
    'received SIGTERM; the ranks have as long as --grace, 30 s to save.'
    """
    limit = "the scheduler gives" if math.isinf(grace_s) else f"--grace, {grace_s:g} s"
    return f"received {signal_name(-signum)}; the ranks have as long as {limit} to save."


def common_command(argv: Sequence[str], script: str) -> str:
    """Return what hosts that are started one by one must agree on: the script and its arguments.

    Their Python and their folders may be at different places.

    >>> common_command(["/opt/bin/python", "/home/a/train.py", "--epochs", "3"], "/home/a/train.py")
    'train.py --epochs 3'
    """
    return shlex.join(Path(word).name if word == script else word for word in argv[1:])


def worker_command(input_path: str = "") -> tuple[str, ...]:
    """Return the command of a rank's agent. One rank's script reads the input at ``input_path``."""
    return (*python_module("torchmn.run.agent_main"), *filter(None, [input_path]))


def python_command(target: str, args: Sequence[str] = (), *, is_module: bool = False) -> list[str]:
    """Return the command that runs a script or a module, which must exist.

    Raises UsageError: there is no such script or module, it cannot be read, or it is a folder.

    Example:
        >>> python_command("timeit", ["-n", "1"], is_module=True)[1:]
        ['-m', 'timeit', '-n', '1']
    """
    if is_module:
        top = target.partition(".")[0]
        if PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
            raise UsageError(
                f"There is no module {target!r}: {top!r} is neither in {Path.cwd()} nor installed."
            )
        return [sys.executable, "-m", target, *args]
    script = Path(target)
    try:
        os.stat(script)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise UsageError(
            f"There is no script {target!r} (looked in {Path.cwd()}).{_hint(target, args)}"
        ) from None
    except OSError as error:
        raise UsageError(f"The script {target!r} cannot be found: {error.strerror}.") from None
    if script.is_dir():
        raise UsageError(
            f"{target!r} is a folder: name the script in it, or use -m to run a package."
        )
    if not os.access(script, os.R_OK):
        raise UsageError(f"The script {target!r} is not readable: change its permissions.")
    return [sys.executable, target, *args]


def program_command(target: str, args: Sequence[str], *, is_module: bool) -> list[str]:
    """Return the command that runs a program without Python (``--no-python``).

    Raises UsageError: there is no such program, or it is asked for a module.

    >>> program_command("sh", ["run.sh"], is_module=False)
    ['sh', 'run.sh']
    """
    if is_module:
        raise UsageError("-m runs a module with Python, and contradicts --no-python.")
    if shutil.which(target) is None:
        raise UsageError(
            f"There is no program {target!r}: write its path, and make it executable; a script in "
            "the current folder is ./NAME. Without --no-python, Python runs it."
        )
    return [target, *args]


def _hint(target: str, args: Sequence[str]) -> str:
    """Suggest what to write in place of a command such as ``python x.py``."""
    if re.fullmatch(r"python[0-9.]*", Path(target).name):
        return f" Leave {target!r} out, Python is started for you: torchmn run {shlex.join(args)}"
    return " Name a Python script, not a command." if shutil.which(target) else ""
