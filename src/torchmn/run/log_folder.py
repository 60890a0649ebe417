"""The log folder of a run: a new one in the folder of ``--log-dir``, which may hold anything."""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

from torchmn.control.private_files import open_private
from torchmn.errors import UsageError
from torchmn.run.job import Job
from torchmn.run.monitor.job_result import run_name

LATEST = "latest"


def make_log_folder(job: Job) -> Job:
    """The job with a folder of its own in ``job.log_dir``, in which ``job.json`` describes it.

    Nothing that is there is changed, except that a link ``latest`` leads to the new folder.
    Raises UsageError: the folder cannot be made.
    """
    try:
        job.log_dir.mkdir(parents=True, exist_ok=True)
        own = replace(job, log_dir=_new_folder(job.log_dir))
        (own.log_dir / "launcher.log").touch(mode=0o600)
        with open(own.log_dir / "job.json", "w", opener=open_private) as file:
            file.write(json.dumps(_record(job), indent=1) + "\n")
    except OSError as error:
        raise UsageError(
            f"The log folder {str(job.log_dir)!r} cannot be used: {error.strerror or error}. "
            "Choose another with --log-dir."
        ) from None
    _link(own.log_dir)
    return own


def _new_folder(parent: Path) -> Path:
    """Hosts that share ``parent`` may have the same process number in the same second."""
    folder = parent / run_name()
    while True:
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            folder = folder.with_name(f"{folder.name}a")
        else:
            return folder


def _link(folder: Path) -> None:
    """Let ``latest`` lead to ``folder``, unless the user has something else by that name."""
    latest, new = folder.parent / LATEST, folder.parent / f".{LATEST}-{folder.name}"
    if latest.exists() and not latest.is_symlink():
        return
    try:
        new.symlink_to(folder.name)
        new.replace(latest)
    except OSError:  # a file system without links: the folder is in the first message
        new.unlink(missing_ok=True)


def _record(job: Job) -> dict[str, object]:
    return {
        "argv": list(job.argv),
        "cwd": str(job.cwd),
        "host": socket.gethostname(),
        "hosts": [str(host) for host in job.hosts],
        "launcher": job.launcher,
        "num_ranks": job.num_ranks,
        "backend": job.backend,
        "python": sys.version.split()[0],
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
