"""Write a job script, and submit it to its scheduler."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torchmn.errors import LaunchError, UsageError
from torchmn.submit.request import JobRequest
from torchmn.submit.scheduler import Ask, Scheduler, ask


def raise_if_folder(path: Path) -> None:
    """Raise UsageError if a folder is named where a job script is to be written."""
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder: name a file in it for the job script.")


def write_script(text: str, path: Path, *, mode: int = 0o700) -> Path | None:
    """Write the script, for this user only, since exported variables may be secrets.

    An existing file with other content is renamed to ``NAME~``: it may have been edited. Returns
    the new path of the old file, if any. Raises UsageError.
    """
    raise_if_folder(path)
    kept = path.with_name(f"{path.name}~")
    try:
        has_other = path.exists() and path.read_bytes() != text.encode()
        if has_other:
            path.replace(kept)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(
            f"The job script {path} cannot be written ({error.strerror}): choose another file "
            "with --output."
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
