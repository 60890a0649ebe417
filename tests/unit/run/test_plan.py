"""From what was asked for to hosts, launcher and backend."""

import os
from pathlib import Path

import pytest

from torchmn.cluster.cpus import Processors
from torchmn.errors import TopologyError, UnknownNameError, UnsupportedError, UsageError
from torchmn.run.plan import RunOptions, detect_existing_rank, plan_job

PATH = {"PATH": os.environ["PATH"]}


def planned(env: dict[str, str] | None = None, **options: object):
    run_options = RunOptions(argv=("python", "x.py"), script="x.py", **options)  # type: ignore[arg-type]
    return plan_job(run_options, env or PATH)[0]


def places(job) -> list[str]:
    return [str(host) for host in job.hosts]


def test_default_is_one_local_rank() -> None:
    job = planned(backend="gloo")
    assert (job.launcher, job.num_ranks, places(job)) == ("local", 1, ["localhost:1"])


def test_ssh_for_other_hosts_without_mpi() -> None:
    job = planned(backend="gloo", hosts="a.invalid:2,b.invalid:1")
    assert (job.launcher, job.num_ranks) == ("ssh", 3)
    assert places(job) == ["a.invalid:2", "b.invalid:1"]


def test_a_host_file(tmp_path: Path) -> None:
    path = tmp_path / "my hosts"
    path.write_text("a.invalid slots=2\nb.invalid slots=2\n")
    job = planned(backend="gloo", hostfile=path, num_ranks=3)
    assert places(job) == ["a.invalid:2", "b.invalid:1"]


def test_host_list_with_only_this_host() -> None:
    job = planned(backend="gloo", hosts="localhost:2")
    assert (job.launcher, places(job)) == ("local", ["localhost:2"])


def test_srun_in_a_slurm_job(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text("")
    srun.chmod(0o755)
    env = {
        "PATH": str(tmp_path),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "x[1-2]",
        "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    }
    job = planned(env, backend="gloo", per_node=2)
    assert (job.launcher, places(job)) == ("srun", ["x1:2", "x2:2"])
    env["PATH"] = "/nowhere"
    assert planned(env, backend="gloo", per_node=2).launcher == "ssh"


def test_hosts_of_a_pbs_job(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("x1\nx1\nx2\nx2\n")
    env = {**PATH, "PBS_NODEFILE": str(nodes), "PBS_JOBID": "1"}
    assert places(planned(env, backend="gloo")) == ["x1:2", "x2:2"]
    assert places(planned(env, backend="gloo", hosts="localhost:1")) == ["localhost:1"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"launcher": "rsh"}, UnknownNameError, "Unknown launcher 'rsh'. Known: auto, local"),
        ({"hosts": "a", "hostfile": Path("h")}, UsageError, "mutually exclusive"),
        ({"hostfile": Path("no such")}, UsageError, r"'no such' cannot be read \(No such file or"),
        ({"hostfile": Path()}, UsageError, r"'\.' cannot be read \(Is a directory\): name another"),
        ({"num_nodes": 2}, UsageError, "--nodes 2 needs a list of hosts"),
        ({"num_ranks": 0}, UsageError, "at least 1, got 0"),
        ({"num_ranks": 2, "per_node": 3}, UsageError, "-n 2 contradicts --per-node 3"),
        ({"hosts": "a.invalid:2", "num_ranks": 3}, UsageError, "3 ranks are more than the 2"),
        ({"hosts": "a.invalid", "launcher": "local"}, UsageError, "on this host only"),
    ],
)
def test_invalid_options(options: dict[str, object], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        planned(backend="gloo", **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_ranks": 3}, "warning: 3 ranks share 2 cores, so that they slow each other down: "),
        ({"per_node": 3, "launcher": "local"}, "start at most 2 on this host"),
        ({"num_ranks": 2}, ""),
        ({"hosts": "localhost:3"}, ""),
        ({"hosts": "a.invalid:3"}, ""),
    ],
)
def test_more_ranks_than_cores_are_mentioned(
    options: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the hosts, and so the slots, were given."""
    two = Processors(logical=(0, 1), physical=((0, 0), (0, 1)))
    monkeypatch.setattr("torchmn.run.plan.available_processors", lambda: two)
    found = planned(backend="gloo", **options).warning
    assert words in found
    assert bool(found) == bool(words)


@pytest.mark.parametrize("launcher", ["local", "ssh"])
def test_mpi_needs_an_mpi_launcher(launcher: str) -> None:
    with pytest.raises(UnsupportedError, match="needs an MPI launcher|--backend mpi needs"):
        planned(backend="mpi", launcher=launcher)


def test_exported_variables() -> None:
    run_options = RunOptions(argv=("x",), exported=("A=1=2", "B", "OMP_NUM_THREADS=3"))
    assert run_options.num_threads == 3
    assert run_options.environment({"B": "b"}) == {"A": "1=2", "B": "b", "OMP_NUM_THREADS": "3"}
    with pytest.raises(UsageError, match="-x B: this variable is not set"):
        run_options.environment({})


INSIDE = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}


def test_existing_rank_is_detected() -> None:
    place = detect_existing_rank(RunOptions(argv=("x",)), INSIDE)
    assert place is not None
    assert (place.rank, place.size) == (1, 4)
    assert detect_existing_rank(RunOptions(argv=("x",), num_ranks=4), INSIDE) is not None
    assert detect_existing_rank(RunOptions(argv=("x",)), {}) is None


@pytest.mark.parametrize("options", [{"num_ranks": 2}, {"hosts": "a"}, {"launcher": "ssh"}])
def test_existing_rank_rejects_other_options(options: dict[str, object]) -> None:
    with pytest.raises(
        TopologyError, match="was itself started as one of several ranks: Open MPI says rank"
    ):
        detect_existing_rank(RunOptions(argv=("x",), **options), INSIDE)  # type: ignore[arg-type]
