"""PBS Pro and OpenPBS: `qsub` reads ``#PBS`` lines, `qstat -f` reports the state.

A job's own standard output is only copied to its place after the job has ended
(qsub(1B), ``-o`` and ``-k``); a folder as ``-o`` gives files named ``<job>.OU`` and ``<job>.ER``.
"""

import re
import shlex

from torchmn.cluster.commands import Answer
from torchmn.submit.request import JobRequest
from torchmn.submit.scheduler import BY_HAND, RESUBMITTED, Ask, JobState, Scheduler, filled

# The substate of a job that was deleted, and what its exit status is then.
_DELETED, _DELETED_STATUS = "91", 143
_LIMITS = {
    "-24": "ncpus",
    "-25": "ncpus",
    "-26": "vmem",
    "-27": "mem",
    "-28": "cput",
    "-29": "walltime",
}
_GONE = re.compile(r"unknown job|has finished", re.IGNORECASE)


class PBS(Scheduler):
    """PBS Pro and OpenPBS."""

    name = "pbs"
    title = "PBS"
    prefix = "#PBS"
    submit_command = ("qsub",)
    cancel_command = "qdel"
    probe_command = "pbsnodes"
    job_id = "${PBS_JOBID%%.*}"
    finds_commands = (
        "command -v pbsnodes >/dev/null || {",
        '  . "${PBS_CONF_FILE:-/etc/pbs.conf}" && PATH="$PBS_EXEC/bin:$PATH"',
        "}",
    )
    folder = "$PBS_O_WORKDIR"

    def options(self, job: JobRequest) -> list[str]:
        """Return the header. It has ``-S``, or the login shell would read the script."""
        settings = job.settings
        chosen = settings.chunk or ""
        chunk = [
            f"select={job.num_nodes}",
            chosen,
            "" if "ncpus=" in chosen else f"ncpus={job.cores_per_node}",
            f"ngpus={settings.gpus}" if settings.gpus and "ngpus=" not in chosen else "",
            f"mpiprocs={job.ranks_per_node}",
            f"ompthreads={settings.threads}" if settings.threads else "",
        ]
        return [
            f"-q {settings.queue}" if settings.queue else "",
            f"-l {':'.join(filter(None, chunk))}",
            # else two chunks may be on one node
            "" if "place=" in " ".join(settings.directives) else "-l place=scatter",
            f"-W group_list={settings.group}" if settings.group else "",
            f"-l walltime={settings.walltime}" if settings.walltime else "",
            f"-N {job.name}",
            f"-r {'y' if job.max_requeues else 'n'}",
            "-j oe" if job.joins_output else f"-e {job.log_dir}/",
            f"-o {job.log_dir}/",
            "-S /bin/bash",
        ]

    def resubmission(self, job: JobRequest) -> list[str]:
        """Submit the same file again. The log reports a site that forbids this on compute nodes.

        SIGTERM before the time limit comes from `qdel`, or from a requeue by PBS itself.
        """
        file = shlex.quote(job.file)
        return filled(
            "resubmit.sh",
            title=self.title,
            verb="deletes",
            state="$last",
            ending="TERM",
            command=f"next=$(qsub {file})",
            program="qsub",
            before=[f'mv "$history" "$logs/{job.name}.${{next%%.*}}.requeues"'],
            resubmitted=RESUBMITTED,
            name="$next",
            by_hand=BY_HAND,
        )

    def state(self, job_id: str, ask: Ask) -> JobState | None:
        """Ask `qstat -f`, and the history, if the site keeps one, for a job not in the queue."""
        answer = ask(["qstat", "-f", job_id])
        if answer.returncode == 0:
            return _state_of(answer)
        if not _GONE.search(answer.text):
            return None
        history = ask(["qstat", "-x", "-f", job_id])
        remembered = _state_of(history) if history.returncode == 0 else None
        return remembered or JobState(word="F", has_ended=True)

    def own_output(self, job: JobRequest, job_id: str) -> tuple[str, ...]:
        """Return PBS's files: output before the script opens its log, or after it is killed."""
        return (f"{job_id}.OU", f"{job_id}.ER")


def _state_of(answer: Answer) -> JobState | None:
    """Parse the state in the ``name = value`` lines of `qstat -f`."""
    word = re.search(r"^\s*job_state = (\w)", answer.out, re.MULTILINE)
    if word is None:
        return None
    status = re.search(r"^\s*exit_status = (-?\d+)", answer.out, re.MULTILINE | re.IGNORECASE)
    substate = re.search(r"^\s*substate = (\d+)", answer.out, re.MULTILINE)
    code = _shell_status(int(status[1])) if status else None
    limit = _LIMITS.get(status[1]) if status else None
    is_deleted = substate is not None and substate[1] == _DELETED
    return JobState(
        word=word[1],
        has_ended=word[1] in ("F", "C"),
        # PBS reports status 0 for some of those that were deleted
        exit_status=(code or _DELETED_STATUS) if is_deleted else code,
        reason="deleted" if is_deleted else f"exceeded its {limit}" if limit else "",
    )


def _shell_status(status: int) -> int:
    """Convert PBS's exit status to a shell's: it is 256 + signal, or negative for its failures."""
    if status < 0:
        return 1
    return status if status < 256 else 128 + (status - 256)
