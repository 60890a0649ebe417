"""An elastic job, and the commands of its hosts."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchmn.base.errors import UsageError
from torchmn.cluster.environment_variables import SECRET_VARIABLE, SUPERVISOR_VARIABLE
from torchmn.control.codec import encode
from torchmn.run.elastic.host_main import RunHost
from torchmn.run.elastic.rendezvous_state import JOIN_TIMEOUT_S, Limits
from torchmn.run.job import Command, Job
from torchmn.run.starters.remote import is_carried, remote_shell_name, to_host


@dataclass(frozen=True, kw_only=True)
class ElasticJob:
    """A job whose hosts may be lost and come back."""

    job: Job
    limits: Limits


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


def host_process(
    elastic: ElasticJob, env: Mapping[str, str], host: str, *, rendezvous: str, supervisor: str
) -> Command:
    """Return the command that runs one host's part of the job, with its order as input."""
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
