"""PBS Pro and OpenPBS: `qsub` reads ``#PBS`` lines, `qstat -f` reports the state.

A job's own standard output is only copied to its place after the job has ended
(qsub(1B), ``-o`` and ``-k``); a folder as ``-o`` gives files named ``<job>.OU`` and ``<job>.ER``.
"""

from __future__ import annotations

import re
import shlex

from torchmn.launch.submit.request import JobRequest
from torchmn.launch.submit.requeue import RESUBMITTED
from torchmn.launch.submit.scheduler import Answer, Ask, JobState, Scheduler

_GONE = re.compile(r"unknown job|has finished", re.IGNORECASE)


class PBS(Scheduler):
    """PBS Pro, OpenPBS."""

    name = "pbs"
    title = "PBS"
    prefix = "#PBS"
    submit_command = ("qsub",)
    cancel_command = "qdel"
    probe_command = "pbsnodes"
    job_id = "${PBS_JOBID%%.*}"
    folder = "$PBS_O_WORKDIR"
    exports_end_time = False

    def directives(self, job: JobRequest) -> list[str]:
        """The lines of the header. ``-S``: without it the login shell would read the script."""
        settings = job.settings
        chunk = [
            f"select={job.num_nodes}",
            *([settings.chunk] if settings.chunk else []),
            f"mpiprocs={job.ranks_per_node}",
            *([f"ompthreads={settings.threads}"] if settings.threads else []),
        ]
        options = [
            *([f"-q {settings.queue}"] if settings.queue else []),
            f"-l {':'.join(chunk)}",
            *([f"-W group_list={settings.group}"] if settings.group else []),
            *([f"-l walltime={settings.walltime}"] if settings.walltime else []),
            f"-N {job.name}",
            *(["-j oe"] if job.joins_output else [f"-e {job.log_dir}/"]),
            f"-o {job.log_dir}/",
            "-S /bin/bash",
        ]
        return [f"{self.prefix} {option}" for option in options]

    def resubmission(self, job: JobRequest) -> list[str]:
        """Submit the same file again; the log says so if a site forbids `qsub` on compute nodes."""
        file = shlex.quote(job.file)
        return [
            f"if next=$(qsub {file}); then",
            f'  echo "{RESUBMITTED} $next"',
            "else",
            '  echo "torchmn: qsub failed on $(hostname): submit this job again by hand" >&2',
            "fi",
        ]

    def state(self, job_id: str, ask: Ask) -> JobState | None:
        """`qstat -f`; for a job that has left the queue the history, where the site keeps one."""
        answer = ask(["qstat", "-f", job_id])
        if answer.returncode == 0:
            return _state_of(answer)
        if not _GONE.search(answer.text):
            return None
        history = ask(["qstat", "-x", "-f", job_id])
        remembered = _state_of(history) if history.returncode == 0 else None
        return JobState(
            word="F", has_ended=True, exit_status=remembered.exit_status if remembered else None
        )

    def own_output(self, job: JobRequest, job_id: str) -> tuple[str, ...]:
        """Output of PBS and of the shell, before the script opens its log or when it is killed."""
        return (f"{job_id}.OU", f"{job_id}.ER")


def _state_of(answer: Answer) -> JobState | None:
    """The state in the ``name = value`` lines of `qstat -f`."""
    word = re.search(r"^\s*job_state = (\w)", answer.out, re.MULTILINE)
    if word is None:
        return None
    status = re.search(r"^\s*exit_status = (-?\d+)", answer.out, re.MULTILINE | re.IGNORECASE)
    return JobState(
        word=word[1],
        has_ended=word[1] in ("F", "C"),
        exit_status=_shell_status(int(status[1])) if status else None,
    )


def _shell_status(status: int) -> int:
    """As a shell reports it: PBS adds 256 to a signal, and is negative if PBS itself failed."""
    if status < 0:
        return 1
    return status if status < 256 else 128 + (status - 256)
