"""Settings are checked before they become lines of a script, and the stronger side wins."""

from pathlib import Path

import pytest

from torchmn.errors import UsageError
from torchmn.submit.request import JobRequest, PythonEnvironment, default_name, find_environment
from torchmn.submit.settings import Settings, settings_from_options


def test_merged_over_defaults() -> None:
    site = Settings(
        queue="h-regular",
        group="gt00",
        modules=("cuda/12",),
        directives=("#PBS -l place=scatter",),
        exports=(("HOME", "/lustre/gt00/me"), ("NCCL_SHM_DISABLE", "1")),
        join_output=True,
    )
    user = Settings(
        queue="h-tutorial", modules=("hdf5",), exports=(("HOME", "/tmp"),), join_output=False
    )
    both = user.merged_over(site)
    assert (both.queue, both.group, both.join_output) == ("h-tutorial", "gt00", False)
    assert both.modules == ("cuda/12", "hdf5")
    assert both.directives == ("#PBS -l place=scatter",)
    assert dict(both.exports) == {"HOME": "/tmp", "NCCL_SHM_DISABLE": "1"}
    assert Settings().merged_over(site) == site
    assert site.merged_over(Settings()) == site


@pytest.mark.parametrize(
    "walltime", ["10 minutes", "00:10", "0:60:00", "1-00:00:00", "00:00:00", "-1:00:00", ""]
)
def test_invalid_walltime(walltime: str) -> None:
    with pytest.raises(UsageError, match="hours:minutes:seconds") as caught:
        Settings(walltime=walltime)
    assert repr(walltime) in str(caught.value)
    assert "00:10:00" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"queue": "a b"}, "queue must be one word without blanks or #, got 'a b'"),
        ({"queue": "a\n#PBS -l walltime=99:00:00"}, "one word"),
        ({"group": ""}, "group must be one word without blanks or #, got ''"),
        ({"chunk": "ncpus=36 ngpus=2"}, "chunk must be one word"),
        ({"parallel_environment": "my pe"}, "parallel_environment must be one word"),
        ({"threads": 0}, "at least 1, got 0"),
        ({"log_dir": "my logs"}, "log_dir must be made of letters"),
        ({"modules": ("cuda/12\nrm",)}, "a single line"),
        ({"directives": ("",)}, "a single line"),
        ({"activate": "a\nb"}, "a single line"),
        ({"exports": (("1A", "x"),)}, "'1A' is not the name of a variable"),
    ],
)
def test_invalid_settings(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings(**settings)  # type: ignore[arg-type]
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": 0}, "--threads must be at least 1, got 0"),
        ({"walltime": "10m"}, "--walltime must be hours:minutes:seconds"),
        ({"log_dir": "my logs"}, "--log-dir must be made of letters"),
        ({"modules": (" ",)}, "--module-load must be a single line"),
    ],
)
def test_options_are_named_as_they_are_written(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        settings_from_options(options)
    assert settings_from_options({"queue": "a", "group": None}) == Settings(queue="a")


def test_secret_cannot_be_exported() -> None:
    with pytest.raises(UsageError, match="other users can read") as caught:
        Settings(exports=(("TORCHMN_SECRET", "word"),))
    assert "word" not in str(caught.value)


# ---- what a job script is made for, and what an environment's name means ----


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
