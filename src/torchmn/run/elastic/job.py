"""An elastic job, and the commands of its hosts."""

import socket
from collections.abc import Mapping

from torchmn.base.errors import UsageError
from torchmn.cluster.environment_variables import (
    BACKEND_VARIABLE,
    HOSTS_VARIABLE,
    PROFILE_VARIABLE,
    SECRET_VARIABLE,
    SUPERVISOR_VARIABLE,
    TRANSPORT_VARIABLE,
)
from torchmn.control.codec import encode
from torchmn.control.messages import HostHello, JobOrder
from torchmn.run.elastic.host_main import RunHost
from torchmn.run.elastic.rendezvous_state import JOIN_TIMEOUT_S
from torchmn.run.host_checks import versions
from torchmn.run.job import Command, Job, common_command
from torchmn.run.starters.remote import is_carried, remote_shell_name, to_host

# What agents must have from the launcher; see `torchmn.run.rank_environment.worker_environment`.
_ORDERED = (BACKEND_VARIABLE, HOSTS_VARIABLE, PROFILE_VARIABLE, TRANSPORT_VARIABLE)


def parse_elastic(text: str) -> tuple[int, int, float]:
    """Parse ``--elastic MIN:MAX[:SECONDS]``: hosts at least and at most, seconds to wait for MIN.

    Raises UsageError: the text has another form.

    >>> parse_elastic("2:4")
    (2, 4, 120.0)
    """
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(map(str.isdecimal, parts)):
        raise UsageError(
            "--elastic must be MIN:MAX hosts, such as 2:4, or MIN:MAX:SECONDS with the time to "
            f"wait for MIN, got {text!r}."
        )
    minimum, maximum, *seconds = map(int, parts)
    return minimum, maximum, float(seconds[0] if seconds else JOIN_TIMEOUT_S)


def job_order(job: Job, env: Mapping[str, str], supervisor: str) -> JobOrder:
    """Return what the launcher tells each host. ``supervisor`` is the address for its agents."""
    # A host that joins has an environment of its own, in which these are missing.
    known = {name: env[name] for name in _ORDERED if name in env}
    return JobOrder(
        cwd=str(job.cwd),
        script=job.script,
        grace_s=job.grace_s,
        signal_grace_s=job.signal_grace_s,
        preemption=job.preemption,
        env={**known, SUPERVISOR_VARIABLE: supervisor},
    )


def own_hello(job: Job) -> HostHello | None:
    """Return what the launcher's own host would say if it joined; None if no host may join."""
    if job.meeting is None:
        return None
    return HostHello(
        host=socket.gethostname(),
        slots=job.hosts[0].slots,
        versions=versions(),
        node_rank=job.node_rank,
        command=common_command(job.argv, job.script),
    )


def host_process(job: Job, env: Mapping[str, str], host: str, *, rendezvous: str) -> Command:
    """Return the command that runs one host's part of the job, with its order as input."""
    order = RunHost(
        host=host,
        slots=next(each.slots for each in job.hosts if each.name == host),
        secret=job.secret,
        rendezvous=rendezvous,
        node_rank=None if job.meeting is None else job.node_rank,
        # On the standard input, not on the command line: other users can read that.
        env={
            name: text
            for name, text in env.items()
            if is_carried(job, name) and name != SECRET_VARIABLE
        },
    )
    return Command(
        to_host(env, host, "torchmn.run.elastic.host_main"),
        env,
        name=f"{remote_shell_name(env)} to {host}",
        stdin=encode(order),
    )
