"""The text of a job script: what the scheduler reads, then plain shell that a user may edit."""

from __future__ import annotations

import shlex

from torchmn.errors import UsageError
from torchmn.launch.submit.request import JobRequest, PythonEnvironment
from torchmn.launch.submit.requeue import last_lines
from torchmn.launch.submit.scheduler import Scheduler

ENDED = "torchmn: the job ended with exit status"
"""Begins the last line of a job's log: who follows it learns the exit status from there."""

_MODULE_COMMANDS = frozenset(["load", "unload", "switch", "swap", "use", "unuse", "purge"])

_VERSIONS = """\
python3 - <<'VERSIONS'
import importlib.metadata, sys
wanted = ("torch", "numpy", "mpi4py", "nvidia-nccl", "nvidia-cudnn", "nvidia-cuda-runtime")
found = {(d.name or "").lower(): d.version for d in importlib.metadata.distributions()}
versions = [f"{name} {found[name]}" for name in sorted(found) if name.startswith(wanted)]
print(", ".join([f"python {sys.version.split()[0]}", *versions]))
VERSIONS"""


def job_script(job: JobRequest, scheduler: Scheduler) -> str:
    """The whole script. Pure. Raises UsageError: this scheduler cannot be asked for such a job."""
    _raise_if_foreign(job, scheduler)
    by_hand = shlex.join([scheduler.submit_command[0], job.file])
    lines = [
        "#!/bin/bash",
        *scheduler.directives(job),
        *job.settings.directives,
        "",
        f"# Made by `torchmn submit` for {scheduler.title}. Edit it as you like and submit it from",
        f"# the same folder: {by_hand}",
        "",
        *_output(job, scheduler),
        *_end(job, scheduler),
        *_modules(job.settings.modules),
        *[f"export {name}={shlex.quote(value)}" for name, value in job.settings.exports],
        *_activation(job.environment),
        "command -v torchmn >/dev/null || {",
        '  echo "torchmn: no torchmn on $(hostname): name its environment with --activate" >&2',
        "  end_job 127",
        "}",
        "",
        f"echo \"{scheduler.title} job $job on $(hostname), $(date '+%Y-%m-%d %H:%M:%S %z')\"",
        _VERSIONS,
        "",
        *_work(job),
        "status=$?",
        *last_lines(job, scheduler),
        'end_job "$status"',
    ]
    return "\n".join(lines) + "\n"


def _raise_if_foreign(job: JobRequest, scheduler: Scheduler) -> None:
    for line in job.settings.directives:
        if line.split()[0] != scheduler.prefix:
            raise UsageError(
                f"A directive for {scheduler.title} begins with {scheduler.prefix} and a blank, "
                f"got {line!r}: correct it, or move it to the table of its scheduler in the "
                "site's file."
            )


def _output(job: JobRequest, scheduler: Scheduler) -> list[str]:
    """To the folder of the submission, with output to a file that can be read while the job runs.

    PBS shows a job's own standard output only after its end, and no scheduler puts a date into
    its name.
    """
    log_dir = shlex.quote(job.log_dir)
    # appended, for a job that is put back may run twice within a second
    to = 'exec >>"$log.log" 2>&1' if job.joins_output else 'exec >>"$log.out" 2>>"$log.err"'
    return [
        f'cd "{scheduler.folder}" || exit 1',
        f"job={scheduler.job_id}",
        f"log={log_dir}/{job.name}.$job.$(date +%Y%m%d-%H%M%S)",
        f"mkdir -p {log_dir} || exit 1",
        to,
        "end_job() {",
        f'  echo "{ENDED} $1"',
        '  exit "$1"',
        "}",
        "",
    ]


def _end(job: JobRequest, scheduler: Scheduler) -> list[str]:
    """When the time is over, for who saves before (`torchmn.topology.walltime`)."""
    if job.settings.walltime is None or scheduler.tells_job_end:
        return []
    hours, minutes, seconds = map(int, job.settings.walltime.split(":"))
    limit_s = (hours * 60 + minutes) * 60 + seconds
    return [f"export TORCHMN_JOB_END=$(($(date +%s) + {limit_s}))  # the walltime above"]


def _modules(modules: tuple[str, ...]) -> list[str]:
    """``module load`` for each; one that begins with another command of `module` stands as it is.

    A shell that is no login shell may lack `module`: the places where sites keep it are read then.
    """
    if not modules:
        return []
    lines = [
        "type module >/dev/null 2>&1 || {",
        '  for file in "$MODULESHOME/init/bash" /etc/profile.d/{modules,lmod}.sh; do',
        '    if [ -r "$file" ]; then . "$file"; break; fi',
        "  done",
        "}",
    ]
    for module in modules:
        words = module.split()
        command = words if words[0] in _MODULE_COMMANDS else ["load", *words]
        lines.append(f"module {shlex.join(command)} || end_job 1")
    return lines


def _activation(environment: PythonEnvironment | None) -> list[str]:
    if environment is None:
        return []
    if environment.kind == "venv":
        return [f". {shlex.quote(environment.where + '/bin/activate')} || end_job 1"]
    return [
        'eval "$(conda shell.bash hook)" || end_job 1',
        f"conda activate {shlex.quote(environment.where)} || end_job 1",
    ]


def _work(job: JobRequest) -> list[str]:
    """`torchmn run`, which takes the nodes from the scheduler. ``$log`` is its folder for ranks."""
    threads = ["--threads", str(job.settings.threads)] if job.settings.threads else []
    exported = [word for name, _ in job.settings.exports for word in ("-x", name)]
    options = shlex.join(["--per-node", str(job.ranks_per_node), *threads, *exported])
    command = shlex.join([job.script, *job.args])
    return [f'torchmn run {options} --log-dir "$log" \\', f"  {command}"]
