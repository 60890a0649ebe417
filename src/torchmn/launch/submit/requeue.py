"""Resubmit a job that saved and exited before its time limit.

`torchmn.resilience.Preemption` ends the ranks with `SAVED_STATUS`, `torchmn run` returns it, and
the last lines of the job script check for it. Directives by which a scheduler warns a job before
its limit are in the file of the scheduler (`slurm.REQUEUE_DIRECTIVES`).
"""

from __future__ import annotations

from torchmn.exit_status import SAVED_STATUS
from torchmn.launch.submit.request import JobRequest
from torchmn.launch.submit.scheduler import Scheduler

RESUBMITTED = "torchmn: resubmitted as"
"""Start of the line in a job's log that names the job in which training continues."""


def last_lines(job: JobRequest, scheduler: Scheduler) -> list[str]:
    """The lines after `torchmn run` that check ``$status``."""
    if not job.requeues:
        return []
    return [
        "",
        f"# Exit status {SAVED_STATUS}: saved before the time limit, continue in a new job.",
        f'if [ "$status" -eq {SAVED_STATUS} ]; then',
        *(f"  {line}" for line in scheduler.resubmission(job)),
        "fi",
    ]
