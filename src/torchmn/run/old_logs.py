"""Remove the log folders of earlier runs, where the user asks for it."""

import os
import re
import shutil
from pathlib import Path

from torchmn.base.errors import LaunchError
from torchmn.run.monitor.inspections import read_inspector
from torchmn.run.monitor.job_result import JOB_FILE

MANY = 100
_NAME = re.compile(r"\d{8}-\d{6}-\d+a*")  # as `run_name` makes them: they sort by time


def remove_old(parent: Path, keep: int | None) -> str:
    """Remove all but the ``keep`` newest log folders of runs; return a sentence to say, or none.

    Folders of jobs that run, or may run on another host, stay and do not count, and so does all
    that `torchmn run` has not made. With None nothing is removed, and at `MANY` folders the
    sentence says how to.
    """
    found = sorted(
        path
        for path in parent.iterdir()
        # Not `Path.is_file`, which raises for the private folder of another user.
        if _NAME.fullmatch(path.name) and os.path.isfile(path / JOB_FILE) and not path.is_symlink()
    )
    if keep is None:
        if len(found) != MANY:  # said once: the next run makes one more
            return ""
        return (
            f"{parent} has the logs of {MANY} runs; --keep-logs N keeps the newest N and removes "
            "older ones."
        )
    ended = [path for path in found if not _may_run(path)]
    for path in ended[: max(0, len(ended) - keep)]:
        shutil.rmtree(path, ignore_errors=True)
    return ""


def _may_run(folder: Path) -> bool:
    try:
        own = read_inspector(folder)
    except LaunchError:
        return True
    return own is not None and own.may_run
