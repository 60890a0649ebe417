"""Settings are checked before they become lines of a script, and the stronger side wins."""

from __future__ import annotations

import pytest

from torchmn.errors import UsageError
from torchmn.submit import Settings, parse_variable, settings_from_options


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


@pytest.mark.parametrize("walltime", ["00:10:00", "4:00:00", "100:00:01"])
def test_walltime(walltime: str) -> None:
    assert Settings(walltime=walltime).walltime == walltime


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
        ({"log_dir": "logs%j"}, "got 'logs%j'"),
        ({"modules": ("cuda/12\nrm",)}, "a single line"),
        ({"modules": (" ",)}, "a single line"),
        ({"directives": ("",)}, "a single line"),
        ({"activate": "a\nb"}, "a single line"),
        ({"exports": (("1A", "x"),)}, "'1A' is not the name of a variable"),
        ({"exports": (("A B", "x"),)}, "'A B' is not the name of a variable"),
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


def test_exports() -> None:
    env = {"HOME": "/root"}
    assert parse_variable("NCCL_SHM_DISABLE=1", env) == ("NCCL_SHM_DISABLE", "1")
    assert parse_variable("A=b=c d", env) == ("A", "b=c d")
    assert parse_variable("EMPTY=", env) == ("EMPTY", "")
    assert parse_variable("HOME", env) == ("HOME", "/root")
    with pytest.raises(UsageError, match="-x MISSING: this variable is not set"):
        parse_variable("MISSING", env)
    with pytest.raises(UsageError, match="is not the name of a variable"):
        parse_variable("=1", env)


def test_secret_cannot_be_exported() -> None:
    with pytest.raises(UsageError, match="other users can read") as caught:
        Settings(exports=(("TORCHMN_SECRET", "word"),))
    assert "word" not in str(caught.value)
