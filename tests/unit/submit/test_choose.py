"""The scheduler that takes the job: asked for, or the only one that is here."""

from pathlib import Path

import pytest

from torchmn.errors import UnknownNameError, UnsupportedError, UsageError
from torchmn.submit.site import (
    SCHEDULERS,
    choose_scheduler,
    installed_schedulers,
    raise_if_no_command,
)


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ([], ()),
        (["sbatch", "scontrol"], ("slurm",)),
        (["qsub", "qstat", "pbsnodes"], ("pbs",)),
        (["qsub", "qstat", "qconf"], ("grid_engine",)),
        (["qsub", "qstat"], ("pbs", "grid_engine")),
        (["qsub", "pbsnodes", "qconf"], ("pbs", "grid_engine")),
        (["qsub", "pbsnodes", "sbatch"], ("pbs", "slurm")),
        (["qconf"], ()),
        (["kubectl"], ()),
    ],
)
def test_schedulers_are_known_by_their_commands(
    tmp_path: Path, commands: list[str], expected: tuple[str, ...]
) -> None:
    for command in commands:
        (tmp_path / command).touch(mode=0o755)
    assert installed_schedulers(str(tmp_path)) == expected


def test_the_one_that_was_asked_for_or_the_only_one() -> None:
    assert choose_scheduler("slurm", ()).name == "slurm"
    assert choose_scheduler("pbs", ("slurm",)).name == "pbs"
    assert choose_scheduler(None, ("grid_engine",)).name == "grid_engine"


def test_refusals_name_the_cure() -> None:
    with pytest.raises(UsageError, match="neither qsub nor sbatch is .*grid_engine --dry"):
        choose_scheduler(None, ())
    with pytest.raises(
        UnsupportedError, match=r"PBS \(qsub\) and Slurm \(sbatch\).* --scheduler pbs\|slurm"
    ):
        choose_scheduler(None, ("pbs", "slurm"))
    with pytest.raises(UnknownNameError, match="'lsf'. Known: pbs, slurm, grid_engine"):
        choose_scheduler("lsf", ())
    with pytest.raises(UsageError, match=r"docs/how-to/kubernetes\.md has one to copy"):
        choose_scheduler("kubernetes", ())


@pytest.mark.parametrize(
    ("name", "command"), [("pbs", "qsub"), ("grid_engine", "qsub"), ("slurm", "sbatch")]
)
def test_a_missing_command_is_named(tmp_path: Path, name: str, command: str) -> None:
    with pytest.raises(UnsupportedError, match=f"submitted with {command}, which is not on the"):
        raise_if_no_command(SCHEDULERS[name], str(tmp_path))
    (tmp_path / command).touch(mode=0o755)
    raise_if_no_command(SCHEDULERS[name], str(tmp_path))
