"""What a job script is made for, and what an environment's name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmn.errors import UsageError
from torchmn.submit import JobRequest, Settings, default_name, find_environment
from torchmn.submit.request import PythonEnvironment


def request(**options: object) -> JobRequest:
    return JobRequest(  # type: ignore[arg-type]
        **{"script": "train.py", "name": "train", "file": "train.pbs.sh", **options}
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks_per_node": 0}, "--per-node must be at least 1"),
        ({"num_nodes": -1}, "--nodes must be at least 1, got -1"),
        ({"name": "my job"}, "got 'my job': use --name my_job"),
        ({"name": "3d"}, "with a letter first, got '3d': use --name job_3d"),
        ({"name": ""}, "got ''"),
        ({"script": ""}, "path of a script must be one line, got ''"),
        ({"file": "a\nrm"}, "path of a job script must be one line"),
        (
            {"settings": Settings(signal=60, walltime="00:01:00")},
            "--signal 60 is not less than the time limit 00:01:00, which is 60 s: ask",
        ),
    ],
)
def test_invalid_requests(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        request(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train_cifar_multi_node.py", "train_cifar_multi_node"),
        ("jobs/3d train.py", "job_3d_train"),
        ("überall.py", "job__berall"),
        ("a.b.py", "a.b"),
    ],
)
def test_default_name_is_valid(script: str, name: str) -> None:
    assert default_name(script) == name
    assert request(name=name).name == name


def test_log_folder() -> None:
    assert request().log_dir == "torchmn-logs"
    assert request(settings=Settings(log_dir="logs/")).log_dir == "logs"
    assert request(settings=Settings(log_dir="/")).log_dir == "/"


def test_find_environment(tmp_path: Path) -> None:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    (tmp_path / "conda" / "conda-meta").mkdir(parents=True)

    def found(text: str) -> PythonEnvironment:
        return find_environment(text, tmp_path)

    assert found("venv") == PythonEnvironment(kind="venv", where="./venv")
    assert found("venv/") == PythonEnvironment(kind="venv", where="./venv")
    assert found(str(tmp_path / "venv")).where == str(tmp_path / "venv")
    assert found("./conda") == PythonEnvironment(kind="conda", where="./conda")
    assert found("chainerMN") == PythonEnvironment(kind="conda", where="chainerMN")
    with pytest.raises(UsageError, match="neither missing/venv/bin/activate"):
        found("missing/venv")


def test_a_script_for_another_machine_needs_no_environment_here(tmp_path: Path) -> None:
    found = find_environment("/lustre/me/venv", tmp_path, is_here=False)
    assert found == PythonEnvironment(kind="venv", where="/lustre/me/venv")
