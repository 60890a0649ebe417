"""Slurm: `sbatch` reads ``#SBATCH`` lines, `scontrol show job` reports the state."""

import re

from torchmn.cluster.commands import Answer
from torchmn.submit.request import JobRequest
from torchmn.submit.scheduler import BY_HAND, RESUBMITTED, Ask, JobState, Scheduler, filled

_ENDED = frozenset(
    [
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    ]
)


class Slurm(Scheduler):
    """The scheduler Slurm."""

    name = "slurm"
    title = "Slurm"
    prefix = "#SBATCH"
    submit_command = ("sbatch", "--parsable")
    cancel_command = "scancel"
    probe_command = "sbatch"
    job_id = "$SLURM_JOB_ID"
    finds_commands = ()
    folder = "$SLURM_SUBMIT_DIR"
    sends_warning = True

    def options(self, job: JobRequest) -> list[str]:
        """Return the header. In file names ``%x.%j`` stands for the job's name and number."""
        settings = job.settings
        own = f"{job.log_dir}/%x.%j.slurm"
        return [
            f"--partition={settings.queue}" if settings.queue else "",
            f"--account={settings.group}" if settings.group else "",
            f"--nodes={job.num_nodes}",
            f"--ntasks-per-node={job.ranks_per_node}",
            f"--cpus-per-task={settings.threads}" if settings.threads else "",
            f"--gpus-per-node={settings.gpus}" if settings.gpus else "",
            f"--time={settings.walltime}" if settings.walltime else "",
            f"--job-name={job.name}",
            f"--output={own}.{'log' if job.joins_output else 'out'}",
            "" if job.joins_output else f"--error={own}.err",
            "--requeue" if job.max_requeues else "--no-requeue",
            "--open-mode=append" if job.max_requeues else "",
            # to the batch shell, which passes it on, since not every launcher makes a step
            f"--signal=B:USR1@{settings.signal}" if settings.signal else "",
        ]

    def resubmission(self, job: JobRequest) -> list[str]:
        """Requeue the job with the same number; Slurm then ends this shell, see `script`.

        A job in state COMPLETING is not requeued: its user is cancelling it, which Slurm would not
        respect, or Slurm requeues it already. The state of a job that is preempted does not change
        until the partition's ``GraceTime`` is over.
        """
        return filled(
            "resubmit.sh",
            title=self.title,
            verb="cancels",
            state='$(squeue --noheader --states=all --format=%T --jobs="$SLURM_JOB_ID")',
            ending="COMPLETING",
            command='scontrol requeue "$SLURM_JOB_ID"',
            program="scontrol requeue",
            before=[],
            resubmitted=RESUBMITTED,
            name=self.job_id,
            by_hand=BY_HAND,
        )

    def state(self, job_id: str, ask: Ask) -> JobState | None:
        """Ask `scontrol`, which forgets a job minutes after its end: the log has the status."""
        answer = ask(["scontrol", "--oneliner", "show", "job", job_id])
        if answer.returncode == 0:
            return _state_of(answer)
        if "Invalid job id" in answer.text:
            return JobState(word="gone", has_ended=True)
        return None


def _state_of(answer: Answer) -> JobState | None:
    """Parse the state in the ``Name=value`` words of `scontrol show job`."""
    state = re.search(r"\bJobState=(\w+)", answer.out)
    status = re.search(r"\bExitCode=(\d+):(\d+)", answer.out)
    if state is None:
        return None
    word = state[1]
    if word not in _ENDED:
        return JobState(word=word)
    code, signal = (int(status[1]), int(status[2])) if status else (0, 0)
    if word != "COMPLETED" and (code, signal) == (0, 0):
        code = 1  # Slurm ended it for a reason of its own
    return JobState(
        word=word,
        has_ended=True,
        exit_status=128 + signal if signal else code,
        reason="" if word in ("COMPLETED", "FAILED") else word,
    )
