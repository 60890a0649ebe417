"""The whole text of a job script, and that every part of it is quoted for the shell."""

import math
import os
import resource
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.limits import limit
from tests.unit.submit.examples import tutorial
from torchmn.cluster.commands import Answer, ask
from torchmn.errors import LaunchError, UsageError
from torchmn.submit.request import PythonEnvironment
from torchmn.submit.script import job_script, make_log_dir, submit, write_script
from torchmn.submit.site import SCHEDULERS


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def script(scheduler: str = "pbs", *, requeues: bool = False, **settings: object) -> str:
    job = replace(tutorial(**settings), max_requeues=10 if requeues else 0)
    return job_script(job, SCHEDULERS[scheduler])


def test_the_ranks_are_started_in_the_background_with_all_options() -> None:
    """The shell waits for them by itself, so that it can pass signals on."""
    text = script(exports=(("NCCL_SHM_DISABLE", "1"),))
    assert (
        'torchmn run -n 4 -x OMP_NUM_THREADS=1 -x NCCL_SHM_DISABLE --log-dir "$log" \\\n'
        "  train_cifar_multi_node.py --no_snapshot --epoch 4 --batchsize 32 &\nrun=$!\n"
    ) in text
    assert 'for name in TERM USR1 USR2; do trap "pass_on $name" "$name"; done' in text


def test_modules_and_conda_in_the_order_of_row_3_5() -> None:
    job = replace(
        tutorial(modules=("anaconda3", "switch intel-mpi openmpi/2"), exports=(("A", "1"),)),
        environment=PythonEnvironment(kind="conda", where="chainerMN"),
    )
    text = job_script(job, SCHEDULERS["pbs"])
    steps = ("load anaconda3", "module switch intel-mpi openmpi/2", "export A=1", "conda activate")
    places = [text.index(step) for step in steps]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("scheduler", "folder", "number"),
    [
        ("pbs", '"$PBS_O_WORKDIR"', "${PBS_JOBID%%.*}"),
        ("slurm", '"$SLURM_SUBMIT_DIR"', "$SLURM_JOB_ID"),
        ("grid_engine", '"$SGE_O_WORKDIR"', "$JOB_ID"),
    ],
)
def test_each_goes_to_its_folder_and_names_its_log(
    scheduler: str, folder: str, number: str
) -> None:
    text = script(scheduler, parallel_environment="mpi")
    assert f"cd {folder} || exit 1\njob={number}\nlogs=" in text


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_time_limit_has_one_place(scheduler: str) -> None:
    text = script(scheduler, walltime="17:23:42", parallel_environment="mpi")
    assert text.count("17:23:42") == 1
    assert str((17 * 60 + 23) * 60 + 42) not in text


def test_separate_output() -> None:
    assert 'exec >>"$log.out" 2>>"$log.err"' in script(join_output=False)


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        ("pbs", "next=$(qsub multi_node_training.sh)"),
        ("slurm", 'scontrol requeue "$SLURM_JOB_ID"'),
        ("grid_engine", 'end_job "$status" 99'),
    ],
)
def test_last_lines_with_and_without_requeue(scheduler: str, words: str) -> None:
    with_it = script(scheduler, requeues=True, parallel_environment="mpi")
    without = script(scheduler, parallel_environment="mpi")
    assert words in with_it
    assert '[ "$status" -eq 85 ]' in with_it
    assert words not in without
    assert "85" not in without


@pytest.mark.parametrize("scheduler", ["pbs", "grid_engine"])
def test_a_scheduler_without_a_warning_has_the_script_send_it(scheduler: str) -> None:
    given = {"parallel_environment": "mpi", "signal": 90}
    assert "sleep 510 &" in script(scheduler, **given)
    assert "sleep" not in script("slurm", **given)
    assert "#SBATCH --signal=B:USR1@90" in script("slurm", **given)
    with pytest.raises(UsageError, match="is not less than the time limit"):
        script(scheduler, parallel_environment="mpi", signal=600)
    with pytest.raises(UsageError, match="pass --walltime"):
        script(scheduler, parallel_environment="mpi", signal=1, walltime=None)


@pytest.mark.processes
@pytest.mark.parametrize("is_late", [True, False])
def test_the_warning_of_the_script_comes_in_time_and_ends_with_it(
    is_late: bool, tmp_path: Path
) -> None:
    """Late enough that the stand-in handles it by then, also on a busy machine."""
    minutes, seconds = divmod(math.ceil(limit(0.4)) + 1, 60)
    walltime = f"00:{minutes:02}:{seconds:02}" if is_late else "01:00:00"
    text = script("pbs", signal=1, walltime=walltime)
    waits = "while :; do sleep 0.1; done" if is_late else "exit 0"
    (tmp_path / "torchmn").write_text(f"#!/bin/sh\ntrap 'exit 7' USR1\n{waits}\n")
    (tmp_path / "torchmn").chmod(0o755)
    for name in ("pbsnodes", "qsub"):
        (tmp_path / name).symlink_to("/bin/true")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PBS_O_WORKDIR": str(tmp_path)}
    # a leftover of the script would keep its standard error open, and communicate waiting
    text = text.replace('exec >>"$log.log" 2>&1', "")
    process = subprocess.Popen(
        ["bash", "-c", text], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = process.communicate(timeout=limit(60))
    assert process.returncode == (7 if is_late else 0), (out, err)


@pytest.mark.parametrize("line", ["#SBATCH --mem=1G", "-l place=scatter", "#PBSX -q a", "# PBS"])
def test_directive_of_another_scheduler_raises(line: str) -> None:
    with pytest.raises(UsageError, match="A directive for PBS must begin with #PBS and a blank"):
        script(directives=(line,))


@pytest.mark.processes
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_script_is_valid_and_quoted(scheduler: str, tmp_path: Path) -> None:
    """The lines that are free text are run by a shell in which `torchmn` only shows its words."""
    hostile = [
        "$(touch broken)",
        "`touch broken`",
        "a 'b' \"c\"",
        "; touch broken",
        "x\ny",
        "*",
        "",
    ]
    job = replace(
        tutorial(
            modules=("cuda/12; touch broken",),
            exports=(("A", "$(touch broken) 'x'"),),
            parallel_environment="mpi",
        ),
        script="my train.py",
        args=tuple(hostile),
        max_requeues=10,
        environment=PythonEnvironment(kind="venv", where="./my $(touch broken) venv"),
    )
    text = job_script(job, SCHEDULERS[scheduler])
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    place = text.index("torchmn run")
    rest = text[place : text.index(" &\nrun=")]
    harmless = "module() { :; }\nend_job() { :; }\ntorchmn() { printf '%s\\0' \"$@\"; }\nlog=logs/x"
    parts = [line for line in text.splitlines() if line.startswith((". ", "module ", "export A="))]
    assert len(parts) == 3
    shown = subprocess.run(
        ["bash", "-c", "\n".join([harmless, *parts[:2], rest, 'printf "%s\\0" "$A"'])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    words = shown.stdout.split("\0")[:-1]
    assert words[-2 - len(hostile) : -1] == ["my train.py", *hostile]
    assert words[-1] == "$(touch broken) 'x'"
    assert not (tmp_path / "broken").exists()
    assert shlex.split(parts[2])[1] == "./my $(touch broken) venv/bin/activate"


# ---- scripts are written without losing an edited one, and submitted -------------------------


def test_an_edited_script_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    assert write_script("one\n", path) is None
    assert path.stat().st_mode & 0o777 == 0o700  # it may hold secrets that are exported
    assert write_script("one\n", path) is None
    path.write_text("one, edited\n")
    kept = write_script("two\n", path)
    assert kept == tmp_path / "job.sh~"
    assert (kept.read_text(), path.read_text()) == ("one, edited\n", "two\n")


def test_a_disk_that_is_full_costs_no_script(tmp_path: Path) -> None:
    """A limit on the size of files stands for it."""
    path = tmp_path / "job.sh"
    path.write_text("edited\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(UsageError, match="cannot be written"):
            write_script("longer than ten bytes\n", path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [each.name for each in tmp_path.iterdir()] == ["job.sh"]
    assert path.read_text() == "edited\n"


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
def test_the_name_of_the_job(scheduler: str, command: list[str], printed: str, job_id: str) -> None:
    asked: list[list[str]] = []

    def answering(argv: Sequence[str]) -> Answer:
        asked.append(list(argv))
        return Answer(returncode=0, out=printed)

    assert submit(tutorial(), SCHEDULERS[scheduler], ask=answering) == job_id
    assert asked == [[*command, "multi_node_training.sh"]]


def test_a_rejected_job_shows_what_the_scheduler_said() -> None:
    answer = Answer(returncode=170, err="qsub: Unknown queue\nqsub: Exiting.\n")
    with pytest.raises(LaunchError) as caught:
        submit(tutorial(), SCHEDULERS["pbs"], ask=lambda _: answer)
    message = str(caught.value)
    assert "qsub: Unknown queue\nqsub: Exiting." in message
    assert "exited with status 170" in message
    assert "multi_node_training.sh" in message


def test_missing_job_id() -> None:
    with pytest.raises(LaunchError, match="printed no job id"):
        submit(tutorial(), SCHEDULERS["pbs"], ask=lambda _: Answer(returncode=0, out="welcome\n"))


def test_a_log_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(UsageError, match="--log-dir"):
        make_log_dir(tutorial(log_dir="logs"))


def test_the_log_folder_is_private(tmp_path: Path) -> None:
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
