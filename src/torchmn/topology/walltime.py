"""When the scheduler will end this job. Reads, never changes.

The job scripts of `torchmn submit` export ``TORCHMN_JOB_END``, in seconds since the epoch; Slurm
sets ``SLURM_JOB_END_TIME`` itself (since 22.05), and older versions answer ``squeue``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Mapping

from torchmn.environment_variables import JOB_END_VARIABLE
from torchmn.errors import TopologyError

_VARIABLES = (JOB_END_VARIABLE, "SLURM_JOB_END_TIME")
_QUERY_S = 10.0


def job_end(env: Mapping[str, str]) -> float | None:
    """The time in seconds since the epoch, or ``None``: there is no limit, or it is unknown.

    Local; queries Slurm's controller if no variable is set. Raises TopologyError: a variable is not
    a number.
    """
    for name in _VARIABLES:
        text = env.get(name)
        if text:
            if not re.fullmatch(r"\d+(\.\d*)?", text):
                raise TopologyError(
                    f"{name} must be a time in seconds since 1970 but is {text!r}. Unset it."
                )
            return float(text)
    squeue = shutil.which("squeue", path=env.get("PATH"))
    job = env.get("SLURM_JOB_ID")
    if squeue is None or not job:
        return None
    try:
        answer = subprocess.run(
            [squeue, "--noheader", "--jobs", job, "--format", "%L"],
            capture_output=True,
            text=True,
            timeout=_QUERY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    left_s = parse_duration(answer.stdout.strip())
    return None if left_s is None else time.time() + left_s


def parse_duration(text: str) -> float | None:
    """Seconds of a scheduler's ``days-hours:minutes:seconds``, ``None`` for other text.

    >>> parse_duration("1-00:00:05"), parse_duration("10:00"), parse_duration("UNLIMITED")
    (86405.0, 600.0, None)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
