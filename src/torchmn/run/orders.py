"""The orders of the programs that the launcher starts, here or on other hosts.

Each is one line on the program's standard input (`torchmn.control.codec`), or in a private file
where it has none, since every user of a host can read command lines.
"""

from __future__ import annotations

from torchmn.control.codec import Record
from torchmn.run.elastic.rendezvous_state import Limits


class ProbeHost(Record, frozen=True, kw_only=True):
    """To `torchmn.run.probe_host`: check these. It prints its `HostFacts`."""

    cwd: str
    script: str
    hosts: list[str] = []


class ProcessOrder(Record, frozen=True, kw_only=True):
    """A command, and the variables that are added to the environment there."""

    argv: list[str]
    env: dict[str, str]


class StartProcesses(Record, frozen=True, kw_only=True):
    """To `torchmn.run.starters.node_main`: start these commands."""

    commands: list[ProcessOrder]


class RunForShell(Record, frozen=True, kw_only=True):
    """To `torchmn.run.starters.pbs_shell`: run this line of a shell for who listens there."""

    command: str
    address: str
    secret: str


class RunHost(Record, frozen=True, kw_only=True):
    """To `torchmn.run.elastic.host_main`: take part in an elastic job as this host."""

    host: str
    slots: int
    secret: str
    rendezvous: str
    cwd: str
    script: str
    grace_s: float
    env: dict[str, str]


class ServeRendezvous(Record, frozen=True, kw_only=True):
    """To `torchmn.run.elastic.rendezvous_main`: listen here. It prints a `RendezvousStarted`."""

    secret: str
    host: str
    port: int
    hosts: list[str]
    limits: Limits


class RendezvousStarted(Record, frozen=True, kw_only=True):
    """The address of the rendezvous and its process, or why it could not listen."""

    address: str = ""
    pid: int = 0
    error: str = ""
