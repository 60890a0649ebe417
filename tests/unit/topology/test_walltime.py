"""When the scheduler ends the job."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from torchmn.errors import TopologyError
from torchmn.topology.walltime import job_end, parse_duration


def test_no_source() -> None:
    assert job_end({}) is None


@pytest.mark.parametrize("name", ["TORCHMN_JOB_END", "SLURM_JOB_END_TIME"])
def test_a_variable(name: str) -> None:
    assert job_end({name: "1700000000"}) == 1.7e9
    with pytest.raises(TopologyError, match=f"{name} must be a time"):
        job_end({name: "tomorrow"})


def test_squeue(tmp_path: Path) -> None:
    """A stand-in for Slurm's command, which answers as ``%L`` does by the manual."""
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\n[ "$3" = 12 ] && echo 1:30:00\n')
    squeue.chmod(0o755)
    end = job_end({"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "12"})
    assert end is not None
    assert 5395 < end - time.time() <= 5400
    assert job_end({"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "13"}) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("59", 59), ("1:00", 60), ("2:00:01", 7201), ("3-00:00:00", 259200), ("INVALID", None)],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds
