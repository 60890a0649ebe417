"""A site's file: found, read, and refused with its name and the key."""

import os
from pathlib import Path

import pytest

from torchmn.errors import TorchmnError, UsageError
from torchmn.submit.site import find_site, read_site

TEXT = """
scheduler = "pbs"
queue = "h-regular"
group = "gt00"
modules = ["cuda/12", "switch intel-mpi openmpi/5"]
activate = "chainerMN"
threads = 4
join_output = true
log_dir = "logs"
exports = { HOME = "/lustre/gt00/me", NCCL_SHM_DISABLE = 1 }

[pbs]
chunk = "ncpus=36:ngpus=2"
directives = ["#PBS -l place=scatter"]

[slurm]
queue = "gpu"
directives = ["#SBATCH --gres=gpu:2"]
exports = { NCCL_SHM_DISABLE = "0" }

[grid_engine]
parallel_environment = "mpi"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "torchmn.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_settings_per_scheduler(tmp_path: Path) -> None:
    site = read_site(written(tmp_path, TEXT))
    assert site.scheduler == "pbs"
    pbs, slurm = site.settings_for("pbs"), site.settings_for("slurm")
    assert pbs.queue == "h-regular"
    assert pbs.chunk == "ncpus=36:ngpus=2"
    assert pbs.directives == ("#PBS -l place=scatter",)
    assert dict(pbs.exports) == {"HOME": "/lustre/gt00/me", "NCCL_SHM_DISABLE": "1"}
    assert (slurm.queue, slurm.chunk, slurm.group) == ("gpu", None, "gt00")
    assert dict(slurm.exports)["NCCL_SHM_DISABLE"] == "0"
    assert slurm.modules == ("cuda/12", "switch intel-mpi openmpi/5")
    assert site.settings_for("grid_engine").parallel_environment == "mpi"
    assert (pbs.threads, pbs.join_output, pbs.activate, pbs.log_dir) == (
        4,
        True,
        "chainerMN",
        "logs",
    )


def test_project_file_before_user_file(tmp_path: Path) -> None:
    folder, home = tmp_path / "work", tmp_path / "home"
    (home / ".config" / "torchmn").mkdir(parents=True)
    folder.mkdir()
    assert find_site(None, folder=folder, home=home) is None
    at_home = home / ".config" / "torchmn" / "site.toml"
    at_home.touch()
    assert find_site(None, folder=folder, home=home) == at_home
    here = written(folder, "")
    assert find_site(None, folder=folder, home=home) == here
    assert find_site(Path("other.toml"), folder=folder, home=home) == Path("other.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("quue = 'a'", "'quue'. Known: queue, group"),
        ("quue = 'a'", "exports, scheduler, [pbs], [slurm], [grid_engine]."),
        ("[pbs]\nquue = 'a'", "directives, exports."),
        ("[pbs]\nscheduler = 'slurm'", "'scheduler'. Known: queue"),
        ("[lsf]\nqueue = 'a'", "'lsf'. Known: "),
        ("scheduler = 'lsf'", "'lsf'. Known: pbs, slurm, grid_engine"),
        ("scheduler = ['pbs']", "['pbs']. Known: pbs"),
        ("queue = 3", "queue must be a string in quotes, got 3"),
        ("threads = true", "threads must be a whole number, got True"),
        ("join_output = 'yes'", "join_output must be true or false, got 'yes'"),
        ("modules = 'cuda'", "modules must be a list of strings"),
        ("exports = ['A=1']", "exports must be a table"),
        ("exports = { A = true }", "exports must be a table"),
        ("walltime = '10m'", "hours:minutes:seconds"),
        ("pbs = 3", "pbs must be a table, got 3: write [pbs]"),
        ("queue = ", "is not valid TOML: "),
    ],
)
def test_invalid_file(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(TorchmnError) as caught:
        read_site(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user as well")
def test_a_home_of_another_user(tmp_path: Path) -> None:
    """As under sudo without -H, which keeps HOME."""
    os.seteuid(65534)
    try:
        assert find_site(None, folder=Path("/"), home=tmp_path) is None
    finally:
        os.seteuid(0)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_site(tmp_path / "none.toml")
