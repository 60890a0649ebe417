"""Grid Engine: `qsub` reads ``#$`` lines, `qstat -j` knows a job until its end, then `qacct` does.

It counts slots, not nodes: how many of them are on one host is decided by the parallel environment
of the site (sge_pe(5), ``allocation_rule``). A slot is a core, so threads count as slots.

Its soft limit, ``s_rt``, is not used for a signal: at that time sge_execd(8) kills the tasks of a
parallel job on other hosts.
"""

import re

from torchmn.base.errors import UsageError
from torchmn.submit.request import JobRequest
from torchmn.submit.scheduler import Ask, JobState, Scheduler

_REQUEUE_STATUS = 99  # a job with this exit status is requeued (sge_shepherd(8))
_RESCHEDULING = 25  # the failure of a run that is followed by another one (sge_status(5))


class GridEngine(Scheduler):
    """The schedulers Sun, Son of, Univa, Altair and Open Cluster Grid Engine."""

    name = "grid_engine"
    title = "Grid Engine"
    prefix = "#$"
    submit_command = ("qsub", "-terse")
    cancel_command = "qdel"
    probe_command = "qconf"
    job_id = "$JOB_ID"
    finds_commands = ('command -v qconf >/dev/null || PATH="$SGE_ROOT/bin/$SGE_ARCH:$PATH"',)
    folder = "$SGE_O_WORKDIR"

    def options(self, job: JobRequest) -> list[str]:
        """Return the header. It has ``-S`` since queues have their own shell, often csh.

        Raises UsageError: several slots without a parallel environment.
        """
        settings = job.settings
        own = f"{job.log_dir}/$JOB_NAME.$JOB_ID.grid_engine"
        return [
            f"-N {job.name}",
            f"-q {settings.queue}" if settings.queue else "",
            f"-P {settings.group}" if settings.group else "",
            _slots(job),
            f"-l h_rt={settings.walltime}" if settings.walltime else "",
            _gpus(job),
            f"-r {'y' if job.max_requeues else 'n'}",
            "-notify" if job.max_requeues else "",
            "-cwd",
            "-S /bin/bash",
            "-j y" if job.joins_output else "",
            f"-o {own}.{'log' if job.joins_output else 'out'}",
            "" if job.joins_output else f"-e {own}.err",
        ]

    def resubmission(self, job: JobRequest) -> list[str]:
        """Have the job run again with the same number, unless the site sets FORBID_RESCHEDULE.

        Grid Engine decides after the script has ended, so the script cannot report success: a job
        that is being deleted is not run again, and has the exit status of its ranks.
        """
        return [
            f'echo "torchmn: exit with {_REQUEUE_STATUS}: Grid Engine runs job $JOB_ID again"',
            f'end_job "$status" {_REQUEUE_STATUS}',
        ]

    def state(self, job_id: str, ask: Ask) -> JobState | None:
        """Ask `qstat`, after the end `qacct`, whose exit status may be missing for a while."""
        answer = ask(["qstat", "-j", job_id])
        if answer.returncode == 0 and "do not exist" not in answer.text:
            trouble = re.search(r"^error reason\s+\d+:\s*(.*)", answer.out, re.MULTILINE)
            return JobState(word=f"E ({trouble[1]})" if trouble else "in the queue or running")
        if "do not exist" not in answer.text:
            return None
        account = ask(["qacct", "-j", job_id])
        status = _exit_status(account.out) if account.returncode == 0 else None
        failures = re.findall(r"^failed\s+([1-9].*\S)", account.out, re.MULTILINE)
        reason = failures[-1] if failures and status else ""
        return JobState(
            word="gone",
            has_ended=True,
            exit_status=status,
            reason=reason,
            is_requeued=_last_failure(account.out) == _RESCHEDULING,
        )


def _gpus(job: JobRequest) -> str:
    """Return the option for GPUs, which a site counts as a resource of each slot."""
    num_gpus, resource = job.settings.gpus, job.settings.gpu_resource
    if num_gpus is None:
        return ""
    if resource is None:
        raise UsageError(
            "Grid Engine has no GPUs of its own: `qconf -sc` shows the resource by which the site "
            'counts them; write gpu_resource = "NAME" into torchmn.toml.'
        )
    if num_gpus % job.cores_per_node:
        raise UsageError(
            f"Grid Engine counts GPUs for each slot, and --gpus {num_gpus} cannot be divided among "
            f"{job.cores_per_node} slots of a node (--per-node times --threads): change one of "
            f'them, or use --directive "#$ -l {resource}=...".'
        )
    return f"-l {resource}={num_gpus // job.cores_per_node}"


def _slots(job: JobRequest) -> str:
    num_slots = job.num_nodes * job.cores_per_node
    if job.settings.parallel_environment:
        return f"-pe {job.settings.parallel_environment} {num_slots}"
    if num_slots == 1:
        return ""
    raise UsageError(
        f"Grid Engine needs a parallel environment for {num_slots} slots, and none is given: "
        '`qconf -spl` lists those of the site; write parallel_environment = "NAME" into '
        "torchmn.toml."
    )


def _exit_status(text: str) -> int | None:
    """Return the exit status in `qacct -j`. A requeued job has a record for each run."""
    statuses = re.findall(r"^exit_status\s+(\d+)", text, re.MULTILINE)
    if not statuses:
        return None
    if int(statuses[-1]) == 0 and _last_failure(text):
        return 1  # Grid Engine ended it for a reason of its own
    return int(statuses[-1])


def _last_failure(text: str) -> int:
    """Return the code by which the last run failed; 0 if it ended by itself."""
    failures = re.findall(r"^failed\s+(\d+)", text, re.MULTILINE)
    return int(failures[-1]) if failures else 0
