"""An elastic job, and the commands of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchmn.cluster import is_this_host
from torchmn.cluster.environment_variables import SECRET_VARIABLE, SUPERVISOR_VARIABLE
from torchmn.control.codec import decode, encode
from torchmn.errors import LaunchError, UsageError
from torchmn.run.elastic.host_main import RunHost
from torchmn.run.elastic.rendezvous import RendezvousStarted, ServeRendezvous
from torchmn.run.elastic.rendezvous_state import Limits
from torchmn.run.job import Command, Job
from torchmn.run.starters.remote import is_carried, remote_shell_name, to_host


@dataclass(frozen=True, kw_only=True)
class ElasticJob:
    """A job whose hosts may be lost and come back.

    ``rendezvous`` is the host that the rendezvous runs on, empty for the launcher's, and
    ``rendezvous_port`` its port, 0 for one that the system chooses.
    """

    job: Job
    limits: Limits
    rendezvous: str = ""
    rendezvous_port: int = 0

    def parse_address(self, line: str) -> str:
        """``host:port`` from the first line of the rendezvous. Raises LaunchError."""
        where = f"{self.rendezvous or 'this host'}:{self.rendezvous_port or 'any port'}"
        try:
            started = decode(line, RendezvousStarted)
        except ValueError:
            raise LaunchError(
                f"The rendezvous at {where} did not start"
                + (f": it answered {line[:80]!r}" if line else "")
                + f". Its output is in {self.job.log_dir / 'launcher.log'}."
            ) from None
        if started.error:
            raise LaunchError(
                f"The rendezvous cannot listen at {where}: {started.error}. Choose another port or "
                "host with --rendezvous."
            )
        return started.address


def parse_elastic(text: str) -> tuple[int, int]:
    """MIN and MAX of ``--elastic MIN:MAX``. Raises UsageError.

    >>> parse_elastic("2:4")
    (2, 4)
    """
    minimum, colon, maximum = text.partition(":")
    if not (colon and minimum.isdecimal() and maximum.isdecimal()):
        raise UsageError(f"--elastic must be MIN:MAX hosts, such as 2:4, got {text!r}.")
    return int(minimum), int(maximum)


def parse_rendezvous(text: str) -> tuple[str, int]:
    """Host and port of ``--rendezvous HOST:PORT``. Raises UsageError.

    >>> parse_rendezvous("n0:29400")
    ('n0', 29400)
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise UsageError(f"--rendezvous must be HOST:PORT, such as n0:29400, got {text!r}.")
    return host, int(port)


def rendezvous_process(elastic: ElasticJob, env: Mapping[str, str], address: str) -> Command:
    """The rendezvous server, on this host or on that of ``--rendezvous``; ``address`` is ours."""
    job, host = elastic.job, elastic.rendezvous
    is_here = not host or is_this_host(host)
    return Command(
        to_host(env, host if not is_here else "localhost", "torchmn.run.elastic.rendezvous"),
        env,
        name="the rendezvous",
        stdin=encode(
            ServeRendezvous(
                secret=job.secret,
                host=host or address,
                port=elastic.rendezvous_port,
                hosts=[each.name for each in job.hosts],
                limits=elastic.limits,
            )
        ),
    )


def host_process(
    elastic: ElasticJob, env: Mapping[str, str], host: str, *, rendezvous: str, supervisor: str
) -> Command:
    """One host's part of the job."""
    job = elastic.job
    order = RunHost(
        host=host,
        slots=next(each.slots for each in job.hosts if each.name == host),
        secret=job.secret,
        rendezvous=rendezvous,
        cwd=str(job.cwd),
        script=job.script,
        grace_s=job.grace_s,
        env={
            name: text
            for name, text in {**env, SUPERVISOR_VARIABLE: supervisor}.items()
            if is_carried(job, name) and name != SECRET_VARIABLE
        },
    )
    return Command(
        to_host(env, host, "torchmn.run.elastic.host_main"),
        env,
        name=f"{remote_shell_name(env)} to {host}",
        stdin=encode(order),
    )
