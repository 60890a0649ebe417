"""Write a job script, and submit it to its scheduler.

Directives of the scheduler come first, then plain shell that a user may edit: ``job.sh``. It
changes to the folder of the submission and redirects its own output, since PBS only makes that of a
job readable after its end. It must receive the scheduler's signals, which a shell would defer until
a command has ended, and survive them: the lines after `torchmn run` decide what becomes of the job.
"""

import re
import shlex
from pathlib import Path

from torchmn.base.errors import LaunchError, UsageError
from torchmn.base.private_files import write_whole
from torchmn.cluster.commands import ask
from torchmn.cluster.walltime import parse_duration
from torchmn.submit.request import JobRequest, PythonEnvironment
from torchmn.submit.scheduler import Ask, Scheduler, filled, first_lines, last_lines

# Start of the last line of a job's log, from which `Follower` reads the exit status.
ENDED = "torchmn: job ended with exit status"

_MODULE_COMMANDS = frozenset(["load", "unload", "switch", "swap", "use", "unuse", "purge"])


def job_script(job: JobRequest, scheduler: Scheduler) -> str:
    """Return the text of the job script. Raises UsageError: the scheduler cannot run the job."""
    _raise_if_foreign(job, scheduler)
    settings = job.settings
    # appended, since a requeued job may run twice within a second
    to_one, to_two = 'exec >>"$log.log" 2>&1', 'exec >>"$log.out" 2>>"$log.err"'
    lines = filled(
        "job.sh",
        directives=[*scheduler.directives(job), *settings.directives],
        title=scheduler.title,
        log_dir=shlex.quote(job.log_dir),
        by_hand=shlex.join([scheduler.submit_command[0], job.file]),
        folder=scheduler.folder,
        job_id=scheduler.job_id,
        name=job.name,
        redirection=[to_one if job.joins_output else to_two],
        ended=ENDED,
        environment=[
            *_modules(settings.modules),
            *[f"export {name}={shlex.quote(value)}" for name, value in settings.exports],
            *scheduler.finds_commands,
            *_activation(job.environment),
        ],
        progress=first_lines(job),
        options=shlex.join(_options(job)),
        command=shlex.join([*(["-m"] if job.is_module else []), job.script, *job.args]),
        warning=[] if scheduler.sends_warning else _warning(job),
        requeue=last_lines(job, scheduler),
    )
    return "\n".join(lines) + "\n"


def _raise_if_foreign(job: JobRequest, scheduler: Scheduler) -> None:
    for line in job.settings.directives:
        if line.split()[0] != scheduler.prefix:
            raise UsageError(
                f"A directive for {scheduler.title} must begin with {scheduler.prefix} and a "
                f"blank, got {line!r}: correct it, or move it to the table of its scheduler in the "
                "site file."
            )


def _modules(modules: tuple[str, ...]) -> list[str]:
    """Return a ``module load`` line for each module, or the given command of `module`.

    A shell that is not a login shell may lack `module`: then its usual files are sourced.
    """
    if not modules:
        return []
    lines = filled("modules.sh")
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


def _options(job: JobRequest) -> list[str]:
    """Return the options of `torchmn run`, which reads the nodes from the scheduler.

    They have the number of all ranks, so that it fails if the scheduler gave fewer slots.
    """
    settings = job.settings
    threads = ["-x", f"OMP_NUM_THREADS={settings.threads}"] if settings.threads else []
    grace = ["--grace", str(settings.grace)] if settings.grace else []
    exported = [word for name, _ in settings.exports for word in ("-x", name)]
    return ["-n", str(job.num_ranks), *threads, *grace, *exported]


def _warning(job: JobRequest) -> list[str]:
    """Return lines that send SIGUSR1 before the time limit. Raises UsageError: no limit."""
    signal, limit = job.settings.signal, job.settings.walltime
    if signal is None:
        return []
    if limit is None:
        raise UsageError("--signal counts from the time limit: pass --walltime too.")
    after_s = round(parse_duration(limit) or 0) - signal
    return filled("warning.sh", before_s=str(signal), after_s=str(after_s))


def raise_if_folder(path: Path) -> None:
    """Raise UsageError if a folder is named where a job script is to be written."""
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder: name a file in it for the job script.")


def write_script(text: str, path: Path) -> Path | None:
    """Write the script, readable by this user only, since exported variables may be secrets.

    An existing file with other content is renamed to ``NAME~``, since it may have been edited.
    Returns the new path of the old file, or None. Raises UsageError.
    """
    raise_if_folder(path)
    kept, draft = path.with_name(f"{path.name}~"), path.with_name(f".{path.name}.new")
    try:
        write_whole(draft, text.encode(), mode=0o700)
        has_other = path.exists() and path.read_bytes() != text.encode()
        if has_other:
            path.replace(kept)
        draft.replace(path)
    except OSError as error:
        raise UsageError(
            f"The script {path} cannot be written ({error.strerror}): choose another file with "
            "--output."
        ) from None
    return kept if has_other else None


def make_log_dir(job: JobRequest) -> None:
    """Create the log folder: PBS, Slurm and Grid Engine open files in it. Raises UsageError."""
    try:
        Path(job.log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"The log folder {job.log_dir} cannot be created ({error.strerror}): choose another "
            "with --log-dir."
        ) from None


def submit(job: JobRequest, scheduler: Scheduler, *, ask: Ask = ask) -> str:
    """Submit the job script in ``job.file``, and return the job's id.

    Raises LaunchError with the output of the scheduler.
    """
    command = [*scheduler.submit_command, job.file]
    answer = ask(command)
    if answer.returncode != 0:
        raise LaunchError(
            f"{scheduler.title} rejected the job: `{' '.join(command)}` exited with status "
            f"{answer.returncode} and this output:\n{answer.text}\nThe script is kept in "
            f"{job.file}: correct the options, or edit it and submit it by hand."
        )
    last = answer.out.strip().splitlines()[-1:] or [""]
    found = re.match(r"\s*(\d[^\s;]*)", last[0])
    if found is None:
        raise LaunchError(
            f"`{' '.join(command)}` succeeded but printed no job id:\n{answer.text}\nCheck the "
            "scheduler's queue."
        )
    return found[1]
