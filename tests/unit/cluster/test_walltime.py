"""When the scheduler ends the job."""

import os
import time
from pathlib import Path

import pytest

from torchmn.cluster.walltime import job_end, parse_duration
from torchmn.errors import CheckpointWarning, TopologyError


def answers(folder: Path, command: str, script: str) -> dict[str, str]:
    """The environment of a stand-in for a scheduler's command."""
    (folder / command).write_text(f"#!/bin/sh\n{script}\n")
    (folder / command).chmod(0o755)
    return {"PATH": f"{folder}:/bin:/usr/bin"}


def test_no_source() -> None:
    assert job_end({}) is None


@pytest.mark.parametrize("name", ["TORCHMN_JOB_END", "SLURM_JOB_END_TIME"])
def test_a_variable(name: str) -> None:
    assert job_end({name: "1700000000"}) == 1.7e9
    with pytest.raises(TopologyError, match=f"{name} must be a time"):
        job_end({name: "tomorrow"})


def test_squeue(tmp_path: Path) -> None:
    """A stand-in for Slurm's command, which answers as ``%L`` does by the manual."""
    env = answers(tmp_path, "squeue", '[ "$5" = 12 ] && echo 1:30:00')
    end = job_end({**env, "SLURM_JOB_ID": "12"})
    assert end is not None
    assert 5395 < end - time.time() <= 5400
    with pytest.warns(CheckpointWarning, match="export TORCHMN_JOB_END"):
        assert job_end({**env, "SLURM_JOB_ID": "13"}) is None


@pytest.mark.parametrize(
    ("inside", "text", "seconds"),
    [
        (
            {"PBS_JOBID": "12"},
            "    Resource_List.walltime = 00:10:00\n    stime = Sun Nov 22 15:00:00 2026\n",
            600,
        ),
        ({"JOB_ID": "12"}, "hard resource_list:         h_rt=300,s_rt=50\n", 300),
    ],
)
def test_qstat_says(tmp_path: Path, inside: dict[str, str], text: str, seconds: float) -> None:
    """A stand-in with the lines of the real ones."""
    env = {**answers(tmp_path, "qstat", f"cat {tmp_path}/answer"), **inside}
    start = time.mktime(time.strptime("Sun Nov 22 15:00:00 2026"))
    (tmp_path / "config").touch()
    os.utime(tmp_path / "config", (start, start))
    if "PBS_JOBID" not in inside:
        env["SGE_JOB_SPOOL_DIR"] = str(tmp_path)
    (tmp_path / "answer").write_text(text)
    assert job_end(env) == start + seconds
    (tmp_path / "answer").write_text("    job_state = R\n")
    assert job_end(env) is None  # no limit


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("59", 59), ("1:00", 60), ("2:00:01", 7201), ("3-00:00:00", 259200), ("INVALID", None)],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


def test_a_time_in_another_form_ends_no_training(tmp_path: Path) -> None:
    lines = r"printf ' Resource_List.walltime = 1:00:00\n stime = 17:03\n'"
    with pytest.warns(CheckpointWarning, match="export TORCHMN_JOB_END"):
        assert job_end({**answers(tmp_path, "qstat", lines), "PBS_JOBID": "12"}) is None
