"""The interface of a scheduler, for writing, following and resubmitting jobs.

A job that saved and exited before its time limit is resubmitted: `torchmn.run.Preemption` ends the
ranks with `SAVED_STATUS`, `torchmn run` returns it, and the last lines of the job script check for
it. They resubmit a job only if it was `Preemption` that ended the ranks, the newest checkpoint is
newer than at the last resubmission, and the limit of resubmissions is not reached.
`torchmn.control.script.record_progress` writes what they read; one line for each resubmission is
kept in a file, which follows the job from number to number.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torchmn.base.errors import SAVED_STATUS
from torchmn.cluster.commands import Answer
from torchmn.cluster.environment_variables import PROGRESS_VARIABLE
from torchmn.submit.request import JobRequest

Ask = Callable[[Sequence[str]], Answer]


@dataclass(frozen=True, kw_only=True)
class JobState:
    """State of a job in the scheduler's own word, and its exit status if the scheduler has it.

    ``reason`` is why the scheduler ended the job, empty if it ended by itself. ``is_requeued``: it
    has ended to run again, and the scheduler does not list it for the moment.
    """

    word: str
    has_ended: bool = False
    exit_status: int | None = None
    reason: str = ""
    is_requeued: bool = False


class Scheduler(Protocol):
    """Interface of a scheduler. A new one is a new file and an entry in `torchmn.submit.site`."""

    name: str  # on the command line and in a site file
    title: str  # in messages
    prefix: str  # of a directive
    submit_command: tuple[str, ...]  # takes the job script as last argument, prints the job's name
    cancel_command: str
    probe_command: str  # only this scheduler has it: PBS and Grid Engine share qsub
    job_id: str  # the job's number inside the job, as a shell word
    finds_commands: tuple[str, ...]  # shell lines that add its commands to the PATH of a job
    folder: str  # from which the job was submitted, as a shell word
    sends_warning: bool = False  # whether it can signal the script, and only that, before the limit

    def options(self, job: JobRequest) -> list[str]:
        """Return the options of the header; empty ones do not count.

        Raises UsageError: this scheduler cannot run such a job.
        """

    def directives(self, job: JobRequest) -> list[str]:
        """Return the lines of the header. Raises UsageError as `options`."""
        return [f"{self.prefix} {option}" for option in self.options(job) if option]

    def resubmission(self, job: JobRequest) -> list[str]:
        """Return shell lines that submit the job again; ``$status`` is 85 there."""

    def state(self, job_id: str, ask: Ask) -> JobState | None:
        """Ask for the state of a job; None without an answer. Called every few seconds."""

    def own_output(self, job: JobRequest, job_id: str) -> tuple[str, ...]:
        """Return patterns, below the log folder, of files that only the scheduler writes.

        Empty by default: the scheduler's files have names like the job's own.
        """
        return ()


def filled(name: str, /, **values: str | Sequence[str]) -> list[str]:
    """Return the lines of a shell file of this folder, with values in place of ``@name@``.

    A line that consists of a name is replaced by all lines of the value.
    """
    lines: list[str] = []
    for line in Path(__file__).with_name(name).read_text().splitlines():
        alone = re.fullmatch(r"( *)@(\w+)@", line)
        if alone is not None:
            lines += [f"{alone[1]}{each}" for each in values[alone[2]]]
        else:
            lines.append(re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), line))
    return lines


# Start of the line in a job's log that names the job in which training continues.
RESUBMITTED = "torchmn: resubmitted as"
BY_HAND = "submit this job by hand to continue"


def first_lines(job: JobRequest) -> list[str]:
    """Return the lines of the script before `torchmn run`."""
    return [f'export {PROGRESS_VARIABLE}="$(realpath "$log").progress"'] if job.max_requeues else []


def last_lines(job: JobRequest, scheduler: Scheduler) -> list[str]:
    """Return the lines after `torchmn run`, which resubmit the job depending on ``$status``."""
    if not job.max_requeues:
        return []
    return filled(
        "requeue.sh",
        saved=str(SAVED_STATUS),
        name=job.name,
        limit=str(job.max_requeues),
        by_hand=BY_HAND,
        resubmission=scheduler.resubmission(job),
    )
