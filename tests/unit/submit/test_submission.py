"""Scripts are written without losing an edited one, and a refusal keeps the scheduler's words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.submit.examples import tutorial
from torchmn.errors import LaunchError, UsageError
from torchmn.submit import SCHEDULERS, make_log_dir, submit, write_script
from torchmn.submit.scheduler import Answer, ask


def test_an_edited_script_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    assert write_script("one\n", path) is None
    assert path.stat().st_mode & 0o777 == 0o700  # it may hold secrets that are exported
    assert write_script("one\n", path) is None
    path.write_text("one, edited\n")
    kept = write_script("two\n", path)
    assert kept == tmp_path / "job.sh~"
    assert (kept.read_text(), path.read_text()) == ("one, edited\n", "two\n")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--output"):
        write_script("one\n", tmp_path / "missing" / "job.sh")
    for folder in (tmp_path, Path(), Path("/")):
        with pytest.raises(UsageError, match="is a folder: name a file in it"):
            write_script("one\n", folder)


@pytest.mark.parametrize(
    ("scheduler", "command", "printed", "job_id"),
    [
        ("pbs", ["qsub"], "4256957.pbs02\n", "4256957.pbs02"),
        ("slurm", ["sbatch", "--parsable"], "7625\n", "7625"),
        ("slurm", ["sbatch", "--parsable"], "7625;cluster\n", "7625"),
        ("grid_engine", ["qsub", "-terse"], "123\n", "123"),
        ("grid_engine", ["qsub", "-terse"], "a word of the site\n123\n", "123"),
    ],
)
def test_the_name_of_the_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheduler: str,
    command: list[str],
    printed: str,
    job_id: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[list[str]] = []

    def answering(argv: Sequence[str]) -> Answer:
        asked.append(list(argv))
        return Answer(returncode=0, out=printed)

    assert submit(tutorial(), SCHEDULERS[scheduler], ask=answering) == job_id
    assert asked == [[*command, "multi_node_training.sh"]]


@pytest.mark.parametrize(
    ("scheduler", "answer"),
    [
        ("pbs", Answer(returncode=170, err="qsub: Unknown queue\n")),
        (
            "slurm",
            Answer(
                returncode=1,
                err="sbatch: error: invalid partition specified: h-tutorial\nsbatch: error: Batch "
                "job submission failed: Invalid partition name specified\n",
            ),
        ),
        (
            "grid_engine",
            Answer(
                returncode=1,
                err='Unable to run job: Job was rejected because job requests unknown queue "a".\n'
                "Exiting.\n",
            ),
        ),
    ],
)
def test_rejected_job_shows_the_scheduler_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str, answer: Answer
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError) as caught:
        submit(tutorial(), SCHEDULERS[scheduler], ask=lambda _: answer)
    message = str(caught.value)
    assert answer.err.strip() in message
    assert f"exited with status {answer.returncode}" in message
    assert "multi_node_training.sh" in message


def test_missing_job_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match="printed no job id"):
        submit(tutorial(), SCHEDULERS["pbs"], ask=lambda _: Answer(returncode=0, out="welcome\n"))


def test_a_log_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").touch()
    with pytest.raises(UsageError, match="--log-dir"):
        make_log_dir(tutorial(log_dir="logs"))


def test_the_log_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_log_dir(tutorial(log_dir="a/b"))
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.processes
def test_command_that_cannot_be_run(tmp_path: Path) -> None:
    missing = ask([str(tmp_path / "qsub")])
    assert missing.returncode == 127
    assert "cannot be run" in missing.text
    slow = ask(["sleep", "5"], limit_s=0.05)
    assert slow.returncode == 124
    assert "did not end within" in slow.text
    assert ask(["true"]).text == "nothing"
