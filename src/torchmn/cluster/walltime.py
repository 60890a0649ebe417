"""Find the time at which the scheduler will end this job. Changes nothing.

A user may export it as ``TORCHMN_JOB_END``, in seconds since the epoch; Slurm sets
``SLURM_JOB_END_TIME`` (since 22.05). Otherwise the scheduler is asked, so that the limit is written
in one place only, and later changes to it take effect.
"""

import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torchmn.base.errors import CheckpointWarning, TopologyError
from torchmn.base.warn import warn
from torchmn.cluster.commands import ask
from torchmn.cluster.environment_variables import JOB_END_VARIABLE

_VARIABLES = (JOB_END_VARIABLE, "SLURM_JOB_END_TIME")
_QUERY_S = 10.0


def job_end(env: Mapping[str, str]) -> float | None:
    """Return the end in seconds since the epoch; None if there is no limit or it is unknown.

    Local; asks the scheduler if no variable is set, and warns if it does not answer. Raises
    TopologyError: a variable is not a number.
    """
    for name in _VARIABLES:
        text = env.get(name)
        if text:
            if not re.fullmatch(r"\d+(\.\d*)?", text):
                raise TopologyError(
                    f"{name} must be a time in seconds since 1970 but is {text!r}. Unset it."
                )
            return float(text)
    for inside, variable, command, end_of in (
        ("SLURM_JOB_ID", "SLURM_JOB_ID", _SQUEUE, _slurm_end),
        ("PBS_JOBID", "PBS_JOBID", ("qstat", "-f"), _pbs_end),
        ("SGE_JOB_SPOOL_DIR", "JOB_ID", ("qstat", "-j"), _grid_engine_end),
    ):
        job = env.get(variable)
        if job and env.get(inside):
            path = shutil.which(command[0], path=env.get("PATH")) or command[0]
            query = (path, *command[1:], job)
            # In the C locale, for the names of days and months in dates are parsed.
            answer = ask(query, limit_s=_QUERY_S, env={**env, "LC_ALL": "C"})
            with suppress(ValueError):  # a time in another form
                if answer.returncode == 0:
                    return end_of(answer.out, env)
            warn(
                f"`{' '.join((*command, job))}` does not say here when this job ends, so that "
                f"its time limit is unknown: export {JOB_END_VARIABLE}, in seconds since 1970.",
                CheckpointWarning,
            )
    return None


_SQUEUE = ("squeue", "--noheader", "--format", "%L", "--jobs")


def _slurm_end(answer: str, _: Mapping[str, str]) -> float | None:
    left_s = parse_duration(answer.strip())
    return None if left_s is None else time.time() + left_s


def _pbs_end(answer: str, _: Mapping[str, str]) -> float | None:
    """Return the end from `qstat -f`, which has the walltime and the time of the start."""
    limit = re.search(r"^\s*Resource_List\.walltime = (\S+)", answer, re.MULTILINE)
    start = re.search(r"^\s*stime = (.+)", answer, re.MULTILINE)
    limit_s = parse_duration(limit[1]) if limit else None
    if limit_s is None or start is None:
        return None
    return time.mktime(time.strptime(start[1].strip())) + limit_s


def _grid_engine_end(answer: str, env: Mapping[str, str]) -> float | None:
    """Return the end from the limit in `qstat -j`, counted from the start of this run."""
    # A file that Grid Engine writes when it starts a run of the job has the time of the start.
    limit = re.search(r"^hard[ _]resource_list:.*\bh_rt=([\d:]+)", answer, re.MULTILINE)
    limit_s = parse_duration(limit[1]) if limit else None
    try:
        start = (Path(env["SGE_JOB_SPOOL_DIR"]) / "config").stat().st_mtime
    except OSError:
        start = time.time()
    return None if limit_s is None else start + limit_s


def parse_duration(text: str) -> float | None:
    """Convert a scheduler's ``days-hours:minutes:seconds`` to seconds; None for other text.

    >>> parse_duration("1-00:00:05"), parse_duration("10:00"), parse_duration("UNLIMITED")
    (86405.0, 600.0, None)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
