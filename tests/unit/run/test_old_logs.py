"""`torchmn run --keep-logs`: which folders of earlier runs are removed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from torchmn.errors import UsageError
from torchmn.run.job import Job
from torchmn.run.monitor.inspections import Inspections
from torchmn.run.old_logs import MANY, remove_old
from torchmn.run.plan import RunOptions, plan_job
from torchmn.run.start import make_log_folder


def run(parent: Path, number: int) -> Path:
    """The log folder of an earlier run, with something that its script has written there."""
    folder = parent / f"20260101-{number:06}-{number + 1}"
    (folder / "steps").mkdir(parents=True)
    (folder / "job.json").write_text("{}")
    (folder / "steps" / "rank0.jsonl").write_text("...")
    return folder


def made(parent: Path, keep_logs: int | None) -> Job:
    options = RunOptions(argv=("true",), num_ranks=1, log_dir=parent, keep_logs=keep_logs)
    return make_log_folder(plan_job(options, {})[0])


def test_the_newest_stay(tmp_path: Path) -> None:
    runs = [run(tmp_path, number) for number in range(4)]
    own = made(tmp_path, 3)
    assert [path.exists() for path in runs] == [False, False, True, True]
    assert own.log_dir.exists()
    assert (tmp_path / "latest").resolve() == own.log_dir.resolve()
    only = made(tmp_path, 1)
    assert [path for path in tmp_path.iterdir() if not path.is_symlink()] == [only.log_dir]


def test_what_torchmn_run_has_not_made_stays(tmp_path: Path) -> None:
    """Other names, links, and folders of the name of a run that are none."""
    run(tmp_path, 0)
    kept = [tmp_path / name for name in ("20260101-000000-7", "notes", "archive-20260101-000000-1")]
    for path in kept:
        path.mkdir()
    (kept[2] / "job.json").write_text("{}")
    elsewhere = run(tmp_path / "other", 5)
    link = tmp_path / elsewhere.name
    link.symlink_to(elsewhere)
    (tmp_path / "20260101-000000-9").write_text("a file")
    made(tmp_path, 1)
    assert all(path.exists() for path in (*kept, link, elsewhere / "job.json"))
    assert (tmp_path / "20260101-000000-9").exists()
    assert not (tmp_path / "20260101-000000-1").exists()


def test_the_folder_of_a_running_job_stays(tmp_path: Path) -> None:
    runs = [run(tmp_path, number) for number in range(3)]
    running = Inspections(runs[0])
    try:
        made(tmp_path, 1)
        assert [path.exists() for path in runs] == [True, False, False]
    finally:
        running.close()
    made(tmp_path, 1)
    assert not runs[0].exists()


def test_by_default_all_stay_and_many_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "torchmn")
    for number in range(MANY - 1):
        run(tmp_path, number)
    assert remove_old(tmp_path, None) == ""
    run(tmp_path, MANY)
    own = made(tmp_path, None)
    assert f"{tmp_path} has the logs of {MANY} runs; --keep-logs N keeps" in caplog.text
    caplog.clear()
    made(tmp_path, None)
    assert caplog.text == ""
    assert len(os.listdir(tmp_path)) == MANY + 3
    assert own.log_dir.exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user as well")
@pytest.mark.parametrize("keep_logs", [None, 1])
def test_runs_of_another_user_in_a_shared_folder_are_left_alone(keep_logs: int | None) -> None:
    """Which are private: whether they have ended cannot be seen."""
    with tempfile.TemporaryDirectory() as name:
        shared = Path(name)
        shared.chmod(0o777)
        other = run(shared, 0)
        other.chmod(0o700)
        os.seteuid(65534)
        try:
            own = made(shared, keep_logs)
        finally:
            os.seteuid(0)
        assert own.log_dir.exists()
        assert (other / "job.json").exists()


def test_none_is_no_number_to_keep(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--keep-logs must be at least 1, got 0"):
        made(tmp_path, 0)
