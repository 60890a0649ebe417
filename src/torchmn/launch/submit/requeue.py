"""A job that is not done when its time is up: it saves, says so, and goes on in a new job.

Who saves (`torchmn.resilience`) ends the workers with `SAVED_STATUS`, `torchmn run` hands it on,
and the last lines of the job script see it. A scheduler may be asked to warn a job before its
limit: such a line belongs to the header, in the file of the scheduler (`slurm.REQUEUE_DIRECTIVES`).
"""

from __future__ import annotations

from torchmn.exit_status import SAVED_STATUS
from torchmn.launch.submit.request import JobRequest
from torchmn.launch.submit.scheduler import Scheduler

GOES_ON = "torchmn: the job goes on as"
"""Begins the line in a job's log that names the job it goes on in."""


def last_lines(job: JobRequest, scheduler: Scheduler) -> list[str]:
    """The lines behind `torchmn run` that look at ``$status``."""
    if not job.requeues:
        return []
    return [
        "",
        f"# Exit status {SAVED_STATUS}: saved before the time limit, go on in a new job.",
        f'if [ "$status" -eq {SAVED_STATUS} ]; then',
        *(f"  {line}" for line in scheduler.resubmission(job)),
        "fi",
    ]
