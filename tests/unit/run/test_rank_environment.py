"""The variables that a script gets."""

from pathlib import Path

import pytest

from torchmn.cluster.cpus import CpuAssignment, assign_cpus, available_processors
from torchmn.run.job import Job
from torchmn.run.rank_environment import script_environment, torchrun_variables
from torchmn.run.starters.remote import is_carried


@pytest.fixture
def share() -> CpuAssignment:
    return assign_cpus(available_processors(), intra_rank=0, intra_size=1)


def test_the_heap_is_kept_between_steps(share: CpuAssignment) -> None:
    env = script_environment({"PATH": "/usr/bin"}, share, {}, None)
    assert int(env["MALLOC_TRIM_THRESHOLD_"]) == 2**30
    assert int(env["MALLOC_MMAP_THRESHOLD_"]) == 2**25


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_settings_of_the_user_are_left_alone(share: CpuAssignment, name: str) -> None:
    env = script_environment({name: "x"}, share, {}, None)
    assert env[name] == "x"
    assert [other for other in env if other.startswith("MALLOC_")] in ([], [name])


def test_the_launcher_knows_the_rank_and_the_supervisor_the_rendezvous(
    share: CpuAssignment,
) -> None:
    ordered = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "9"}
    given = {"RANK": "1", "LOCAL_RANK": "7", "MASTER_ADDR": "old", "MASTER_PORT": "1"}
    env = script_environment(given, share, ordered, None)
    assert env["LOCAL_RANK"] == "7"
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("n0", "9")


def test_torchruns_variables_follow_the_hosts() -> None:
    found = torchrun_variables(["a", "b", "a"])
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [" ".join(own[name] for name in names) for own in found] == [
        "0 3 0 2 0",
        "1 3 0 1 1",
        "2 3 1 2 0",
    ]


@pytest.mark.parametrize(
    ("given", "seed"),
    [({}, "0"), ({"PYTHONHASHSEED": "random"}, "0"), ({"PYTHONHASHSEED": "7"}, "7")],
)
def test_all_ranks_of_all_runs_hash_strings_alike(
    share: CpuAssignment, given: dict[str, str], seed: str
) -> None:
    """On this host and, by the variable that is sent there, on others."""
    assert script_environment(given, share, {}, None)["PYTHONHASHSEED"] == seed
    job = Job(argv=("python", "train.py"), num_ranks=2, backend="gloo", log_dir=Path("logs"))
    assert is_carried(job, "PYTHONHASHSEED")
