"""The hosts of a job according to PBS, Slurm and Grid Engine."""

from pathlib import Path

import pytest

from torchmn.cluster.allocation import allocation, is_scheduled
from torchmn.errors import TopologyError

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}


def test_outside_of_any_job() -> None:
    assert allocation({}) is None
    assert allocation({"PBS_NODEFILE": "/nodes"}) is None  # left over


def test_pbs_has_a_line_per_worker(tmp_path: Path) -> None:
    nodes = tmp_path / "123.server"
    nodes.write_text("r1n1\nr1n1\nr1n2\nr1n2\n")
    given = allocation({"PBS_NODEFILE": str(nodes), "PBS_JOBID": "123.server"})
    assert str(given) == "PBS job 123.server on r1n1:2, r1n2:2"


def test_slurm_counts_tasks_if_they_were_requested_and_else_processors() -> None:
    assert str(allocation(SLURM)) == "Slurm job 7 on n1:4, n2:4"
    requested = {**SLURM, "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}
    assert str(allocation(requested)) == "Slurm job 7 on n1:2, n2:1"


def test_grid_engine_has_a_row_per_host(tmp_path: Path) -> None:
    rows = tmp_path / "pe_hostfile"
    rows.write_text("n1 2 all.q@n1 UNDEFINED\nn2 1 all.q@n2 <NULL>\n")
    given = allocation({"PE_HOSTFILE": str(rows), "JOB_ID": "5"})
    assert str(given) == "Grid Engine job 5 on n1:2, n2:1"
    assert given is not None
    assert [str(host) for host in given.hosts_for(None)] == ["n1:2", "n2:1"]
    assert [str(host) for host in given.hosts_for(2)] == ["n1:1"]  # a slot is a core


def test_a_scheduler_that_ends_the_job_in_time() -> None:
    assert is_scheduled(SLURM)
    assert not is_scheduled({"JOB_COMPLETION_INDEX": "2"})  # of Kubernetes


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({**SLURM, "SLURM_JOB_CPUS_PER_NODE": "4"}, "names 2 host.* counts 1"),
        ({**SLURM, "SLURM_JOB_NODELIST": "n["}, "SLURM_JOB_NODELIST must look like"),
        ({"PBS_NODEFILE": "/no/such", "PBS_JOBID": "1"}, "PBS_NODEFILE=/no/such cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        allocation(env)


def test_two_schedulers_that_contradict_each_other(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("x1\n")
    env = {**SLURM, "PBS_NODEFILE": str(nodes), "PBS_JOBID": "1"}
    with pytest.raises(TopologyError, match=r"PBS job 1 on x1:1 .*Slurm job 7 on n1:4"):
        allocation(env)


def test_a_file_of_grid_engine_with_other_lines(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.write_text("n1\n")
    with pytest.raises(TopologyError, match="must hold lines like"):
        allocation({"PE_HOSTFILE": str(rows), "JOB_ID": "5"})
