"""Resubmit a job that saved and exited before its time limit.

`torchmn.run.Preemption` ends the ranks with `SAVED_STATUS`, `torchmn run` returns it, and
the last lines of the job script check for it. They resubmit a job only if it was `Preemption` that
ended the ranks, the newest checkpoint is newer than at the last resubmission, and the limit of
resubmissions is not reached. `torchmn.control.script.record_progress` writes what they read;
one line for each resubmission is kept in a file, which follows the job from number to number.
"""

from __future__ import annotations

from torchmn.cluster.environment_variables import PROGRESS_VARIABLE
from torchmn.errors import SAVED_STATUS
from torchmn.submit.request import JobRequest
from torchmn.submit.scheduler import Scheduler, filled

RESUBMITTED = "torchmn: resubmitted as"
"""Start of the line in a job's log that names the job in which training continues."""
_BY_HAND = "submit this job by hand to continue"


def first_lines(job: JobRequest) -> list[str]:
    """The lines before `torchmn run`."""
    return [f'export {PROGRESS_VARIABLE}="$(realpath "$log").progress"'] if job.max_requeues else []


def last_lines(job: JobRequest, scheduler: Scheduler) -> list[str]:
    """The lines after `torchmn run` that check ``$status``."""
    if not job.max_requeues:
        return []
    return filled(
        "requeue.sh",
        saved=str(SAVED_STATUS),
        name=job.name,
        limit=str(job.max_requeues),
        by_hand=_BY_HAND,
        resubmission=scheduler.resubmission(job),
    )


def before_the_limit() -> list[str]:
    """Shell lines after which ``$early`` is yes before the time limit, or without one, else no."""
    return [
        "limit=$(sed -n 's/^limit //p' \"$log.progress\")",
        'early=no; [ "$(date +%s)" -ge "${limit:-9999999999}" ] || early=yes',
    ]


def resubmitted(name: str) -> str:
    """The shell command that reports the job in which training continues, a shell word."""
    return f'echo "{RESUBMITTED} {name}"'


def refused(command: str) -> str:
    """The shell command that reports that the scheduler did not accept it."""
    return f'echo "torchmn: {command} failed on $(hostname): {_BY_HAND}" >&2'
