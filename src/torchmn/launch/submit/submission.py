"""Write a job script and hand it to its scheduler."""

from __future__ import annotations

import re
from pathlib import Path

from torchmn.errors import LaunchError, UsageError
from torchmn.launch.submit.request import JobRequest
from torchmn.launch.submit.scheduler import Ask, Scheduler, ask


def write_script(text: str, path: Path) -> Path | None:
    """Write the script. A file of that name that says something else is kept as ``NAME~``.

    It may have been edited: the path of what was kept is returned. Raises UsageError.
    """
    kept = path.with_name(f"{path.name}~")
    try:
        has_other = path.exists() and path.read_bytes() != text.encode()
        if has_other:
            path.replace(kept)
        path.write_text(text, encoding="utf-8")
        path.chmod(path.stat().st_mode | 0o100)
    except OSError as error:
        raise UsageError(
            f"The job script {path} cannot be written ({error.strerror}): name another file with "
            "--output."
        ) from None
    return kept if has_other else None


def submit(job: JobRequest, scheduler: Scheduler, *, ask: Ask = ask) -> str:
    """Hand the job script in ``job.file`` to the scheduler, and return what it calls the job.

    The log folder is made before: PBS, Slurm and Grid Engine open files in it and make no folder.
    Raises LaunchError with the scheduler's own words.
    """
    try:
        Path(job.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"The log folder {job.log_dir} cannot be made ({error.strerror}): name another with "
            "--log-dir."
        ) from None
    command = [*scheduler.submit_command, job.file]
    answer = ask(command)
    if answer.returncode != 0:
        raise LaunchError(
            f"{scheduler.title} refused the job: `{' '.join(command)}` ended with exit status "
            f"{answer.returncode} and these words:\n{answer.words}\nThe script is kept in "
            f"{job.file}; correct the options, or edit it and submit it by hand."
        )
    last = answer.out.strip().splitlines()[-1:] or [""]
    found = re.match(r"\s*(\d[^\s;]*)", last[0])
    if found is None:
        raise LaunchError(
            f"`{' '.join(command)}` ended well but named no job; it said:\n{answer.words}\nSee in "
            "the scheduler's queue whether the job is there."
        )
    return found[1]
