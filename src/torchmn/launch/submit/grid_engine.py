"""Grid Engine: `qsub` reads ``#$`` lines, `qstat -j` knows a job until its end, then `qacct` does.

It counts slots, not nodes: how many lie on one host is a rule of the parallel environment, which a
site makes (sge_pe(5), ``allocation_rule``). A slot stands for a core, so threads count as slots.
"""

from __future__ import annotations

import re

from torchmn.errors import UsageError
from torchmn.launch.submit.request import JobRequest
from torchmn.launch.submit.requeue import GOES_ON
from torchmn.launch.submit.scheduler import Ask, JobState

_GO_ON = 99
"""A job with this exit status is put back into the queue (sge_shepherd(8))."""


class GridEngine:
    """Sun, Son of, Univa, Altair and Open Cluster Grid Engine."""

    name = "grid_engine"
    title = "Grid Engine"
    prefix = "#$"
    submit_command = ("qsub", "-terse")
    cancel_command = "qdel"
    sign = "qconf"
    job_id = "$JOB_ID"
    folder = "$SGE_O_WORKDIR"
    tells_job_end = False

    def directives(self, job: JobRequest) -> list[str]:
        """The lines of the header. ``-S``: queues have a shell of their own, often csh.

        Raises UsageError: several slots, and no parallel environment to take them from.
        """
        settings = job.settings
        own = f"{job.log_dir}/$JOB_NAME.$JOB_ID.grid_engine"
        options = [
            f"-N {job.name}",
            *([f"-q {settings.queue}"] if settings.queue else []),
            *([f"-P {settings.group}"] if settings.group else []),
            *_slots(job),
            *([f"-l h_rt={settings.walltime}"] if settings.walltime else []),
            "-cwd",
            "-S /bin/bash",
            *(["-j y", f"-o {own}.log"] if job.joins_output else [f"-o {own}.out"]),
            *([] if job.joins_output else [f"-e {own}.err"]),
        ]
        return [f"{self.prefix} {option}" for option in options]

    def resubmission(self, job: JobRequest) -> list[str]:
        """The same job with the same number, unless the site set FORBID_RESCHEDULE."""
        return [f'echo "{GOES_ON} $JOB_ID"', f"status={_GO_ON}"]

    def state(self, job_id: str, ask: Ask) -> JobState | None:
        """`qacct` needs a while to learn of an end: until then the exit status is ``None``."""
        answer = ask(["qstat", "-j", job_id])
        if answer.returncode == 0 and "do not exist" not in answer.words:
            trouble = re.search(r"^error reason\s+\d+:\s*(.*)", answer.out, re.MULTILINE)
            return JobState(word=f"E ({trouble[1]})" if trouble else "in the queue or running")
        if "do not exist" not in answer.words:
            return None
        account = ask(["qacct", "-j", job_id])
        status = _exit_status(account.out) if account.returncode == 0 else None
        return JobState(word="gone", has_ended=True, exit_status=status)

    def own_output(self, job: JobRequest, job_id: str) -> tuple[str, ...]:
        """None besides those that are named like the job's own, and so are found with them."""
        return ()


def _slots(job: JobRequest) -> list[str]:
    num_slots = job.num_nodes * job.ranks_per_node * (job.settings.threads or 1)
    if job.settings.parallel_environment:
        return [f"-pe {job.settings.parallel_environment} {num_slots}"]
    if num_slots == 1:
        return []
    raise UsageError(
        f"Grid Engine gives {num_slots} slots only through a parallel environment, and none is "
        'named: `qconf -spl` lists those of the site; write parallel_environment = "NAME" into '
        "torchmn.toml."
    )


def _exit_status(text: str) -> int | None:
    """From the last record of `qacct -j`: a job that was put back has one for every run."""
    statuses = re.findall(r"^exit_status\s+(\d+)", text, re.MULTILINE)
    failures = re.findall(r"^failed\s+(\d+)", text, re.MULTILINE)
    if not statuses:
        return None
    if int(statuses[-1]) == 0 and failures and int(failures[-1]) != 0:
        return 1  # Grid Engine ended it for a reason of its own
    return int(statuses[-1])
