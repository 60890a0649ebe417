"""The commands of each way of starting ranks, and the port of the job."""

import json
import socket
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from torchmn.cluster.hostlists import Host
from torchmn.cluster.network import Route
from torchmn.control.connection import reserve_port
from torchmn.control.processes import python_module
from torchmn.errors import LaunchError, UnsupportedError, UsageError
from torchmn.run.job import Command, Job, worker_command
from torchmn.run.rank_environment import worker_environment
from torchmn.run.starters import local, mpirun, remote, srun
from torchmn.run.starters.remote import PBS_SHELL, QRSH_SHELL, SSH, remote_shell, to_host

ROUTE = Route(address="10.1.0.1", interface="eth1", network="10.1.0.0/24")


def job(num_ranks: int = 2, **options: object) -> Job:
    return Job(  # type: ignore[arg-type]
        **{
            "argv": ("python", "x.py"),
            "num_ranks": num_ranks,
            "backend": "gloo",
            "log_dir": Path("logs"),
            **options,
        }
    )


def test_local_ranks_have_the_variables_of_torchrun() -> None:
    commands = local.commands(job(3), {"KEPT": "1"})
    assert [command.env["RANK"] for command in commands] == ["0", "1", "2"]
    assert {command.env["WORLD_SIZE"] for command in commands} == {"3"}
    assert all(command.env["KEPT"] == "1" for command in commands)
    assert [command.ranks for command in commands] == [range(rank, rank + 1) for rank in range(3)]


def test_reserved_port_can_only_be_used_by_rank_0() -> None:
    keeper, port = reserve_port()
    with closing(keeper):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = dist.TCPStore("127.0.0.1", port, 1, is_master=True, timeout=timedelta(seconds=10))
        store.set("key", "value")
        assert store.get("key") == b"value"
        del store


def open_mpi(job: Job, env: dict[str, str], path: str, **options: Any) -> Command:
    given = {"flavour": "Open MPI", "num_cores": 2, "is_root": False, **options}
    return mpirun.command(job, env, mpirun=path, **given)


@pytest.mark.parametrize(("num_ranks", "num_cores", "yields"), [(2, 2, False), (4, 2, True)])
def test_open_mpi(num_ranks: int, num_cores: int, yields: bool) -> None:
    command = open_mpi(job(num_ranks), {}, "/a b/mpirun", num_cores=num_cores, is_root=yields)
    assert command.argv[0] == "/a b/mpirun"
    assert f"localhost:{num_ranks}" in command.argv
    assert command.argv[-len(worker_command()) :] == worker_command()
    assert ("mpi_yield_when_idle" in command.argv) is yields
    assert ("--allow-run-as-root" in command.argv) is yields
    assert command.ranks is None


@pytest.mark.parametrize("env", [{}, {"OMPI_MCA_btl": "self,tcp"}])
def test_mpirun_of_the_wheel_disables_ofi_by_default(env: dict[str, str]) -> None:
    def started(path: Path) -> Command:
        return open_mpi(job(), env, str(path))

    wheel = started(Path(sys.executable).parent / "mpirun")
    assert wheel.env["OMPI_MCA_btl"] == env.get("OMPI_MCA_btl", "^ofi")
    assert started(Path("/opt/site/bin/mpirun")).env == env


def test_hydra_options() -> None:
    command = mpirun.command(
        job(), {}, mpirun="mpiexec", flavour="Hydra", num_cores=1, is_root=True
    )
    options = command.argv[1 : -len(worker_command())]
    assert options == ("-rmk", "user", "-bind-to", "none", "-n", "2", "-launcher", "fork")


def hydra(flavour: mpirun.Flavour, env: dict[str, str], *launcher_args: str) -> Command:
    hosts = (Host(name="a", slots=1), Host(name="b", slots=2))
    return mpirun.command(
        job(3, hosts=hosts, launcher_args=launcher_args),
        {"PATH": "/usr/bin:/bin", "EDITOR": "vi", "TORCHMN_RSH": "env -i sh", **env},
        mpirun="mpiexec",
        flavour=flavour,
        num_cores=1,
        is_root=True,
        route=ROUTE,
    )


def test_hydra_on_hosts() -> None:
    command = hydra("Hydra", {"OMP_NUM_THREADS": "1"}, "-l")
    words = " ".join(command.argv[1 : -len(worker_command())])
    assert words == (
        "-rmk user -bind-to none -n 3 -hosts a:1,b:2 -launcher rsh -launcher-exec /usr/bin/env "
        "-localhost 10.1.0.1 -genvlist PATH,TORCHMN_RSH,OMP_NUM_THREADS -l"
    )
    assert command.env["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-i sh"


def test_the_last_variable_is_one_that_hydra_may_lose() -> None:
    chosen = {"HYDRA_LAUNCHER_EXTRA_ARGS": "-q", "OMP_NUM_THREADS": "1"}
    command = hydra("Hydra", chosen)
    assert list(command.env.items())[-1] == ("HYDRA_LAUNCHER_EXTRA_ARGS", "-q")


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ("env -S 'a b'", "splits the arguments of the remote shell at blanks"),
        ("no-such-shell", "'no-such-shell' is not on the PATH"),
    ],
)
def test_remote_shells_that_hydra_cannot_use(shell: str, words: str) -> None:
    with pytest.raises((LaunchError, UnsupportedError), match=words):
        hydra("Hydra", {"TORCHMN_RSH": shell})


@pytest.mark.processes
def test_flavours(tmp_path: Path) -> None:
    def flavour_of(words: str) -> str:
        """Of an mpirun that says these words about itself."""
        tool = tmp_path / "mpirun"
        tool.write_text(f"#!/bin/sh\necho '{words}'\n")
        tool.chmod(0o755)
        return mpirun.flavour_of(str(tool))[0]

    assert (
        flavour_of("mpirun (Open MPI) 5.0.11") == flavour_of("mpirun (OpenRTE) 1.8") == "Open MPI"
    )
    assert flavour_of("HYDRA build details:") == "Hydra"
    with pytest.raises(LaunchError, match="something else"):
        flavour_of("something else")
    with pytest.raises(LaunchError, match="does not answer"):
        mpirun.flavour_of(str(tmp_path / "missing"))


def test_clean_environment_keeps_the_users_settings() -> None:
    left = {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    kept = {"OMPI_MCA_btl": "self", "PRTE_MCA_plm": "ssh", "PATH": "/bin", "RANKING": "1"}
    cleaned = worker_environment(job(), {**left, **kept})
    assert {name: text for name, text in cleaned.items() if not name.startswith("TORCHMN_")} == kept


def test_environment_of_the_job() -> None:
    env = worker_environment(job(backend="nccl"), {"A": "1"})
    assert (env["A"], env["TORCHMN_TRANSPORT"], env["TORCHMN_BACKEND"]) == ("1", "torch", "nccl")
    assert worker_environment(job(backend="mpi"), {})["TORCHMN_TRANSPORT"] == "mpi"
    assert env["TORCHMN_SECRET"] not in repr(job())
    assert len(env["TORCHMN_SECRET"]) == 64


TWO_HOSTS = (Host(name="a", slots=2), Host(name="b", slots=1))


def on_hosts(**options: object) -> Job:
    return job(3, hosts=TWO_HOSTS, exported=("MINE",), **options)


def order_of(command: Command) -> list[dict[str, Any]]:
    """What a command for another host reads there."""
    commands: list[dict[str, Any]] = json.loads(command.stdin)["commands"]
    return commands


def test_ssh_commands_do_not_show_the_secret() -> None:
    given = {"MINE": "1", "OTHERS": "2", "NCCL_DEBUG": "INFO"}
    env = worker_environment(on_hosts(launcher="ssh"), given)
    first, second = remote.commands(on_hosts(launcher="ssh"), {**env, "PATH": "/bin"})
    assert first.argv[:6] == (*SSH, "a")
    assert "torchmn.run.starters.node_main" in first.argv[-1]
    assert (first.ranks, second.ranks) == (range(2), range(2, 3))
    assert [one["env"]["RANK"] for one in order_of(first)] == ["0", "1"]
    (order,) = order_of(second)
    sent = order["env"]
    assert (sent["RANK"], sent["LOCAL_RANK"], sent["GROUP_RANK"]) == ("2", "0", "1")
    assert (sent["WORLD_SIZE"], sent["LOCAL_WORLD_SIZE"], sent["GROUP_WORLD_SIZE"]) == (
        *("3", "1", "2"),
    )
    assert (sent["MINE"], sent["NCCL_DEBUG"]) == ("1", "INFO")
    assert "OTHERS" not in sent
    assert sent["TORCHMN_SECRET"] == env["TORCHMN_SECRET"]
    assert not any(env["TORCHMN_SECRET"] in word for word in (*first.argv, *second.argv))


def test_remote_shell(tmp_path: Path) -> None:
    assert remote_shell({}) == SSH
    assert remote_shell({"TORCHMN_RSH": "'my rsh' -v"}) == ("my rsh", "-v")
    for name in ("pbs_tmrsh", "qrsh", "srun"):
        (tmp_path / name).touch(mode=0o755)
    path = {"PATH": str(tmp_path)}
    pbs = {**path, "PBS_JOBID": "1", "PBS_NODEFILE": "x"}
    assert remote_shell(pbs) == remote_shell({"TORCHMN_RSH": "pbs_tmrsh"})
    assert remote_shell(pbs) == python_module(PBS_SHELL)  # pbs_tmrsh itself is no remote shell
    with pytest.raises(UsageError, match="Correct its quotes"):
        remote_shell({"TORCHMN_RSH": "'ssh -p 22"})
    grid_engine = {**path, "JOB_ID": "1", "PE_HOSTFILE": "x"}
    assert remote_shell(grid_engine) == python_module(QRSH_SHELL)
    assert remote_shell({"PBS_JOBID": "1", "PBS_NODEFILE": "x", "PATH": "/nowhere"}) == SSH
    assert remote_shell(path) == SSH
    slurm = {**path, "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a"}
    assert remote_shell(slurm)[0] == "srun"
    words = to_host(slurm, "a.invalid", "a.module")
    assert words == (*remote_shell(slurm), "a.invalid", *python_module("a.module"))
    assert to_host({}, "localhost", "a.module") == python_module("a.module")


@pytest.mark.parametrize("major", [4, 5])
def test_open_mpi_between_hosts(major: int) -> None:
    command = open_mpi(
        on_hosts(launcher_args=("--mca", "pml", "^yalla")),
        {"MINE": "1", "TORCHMN_RSH": "rsh -v", "UNKNOWN": "1"},
        "/opt/mpi/bin/mpirun",
        major=major,
        route=ROUTE,
        networks=("10.0.0.0/24",),
    )
    words = " ".join(command.argv)
    assert "--host a:2,b:1 " in words
    assert "--mca btl_tcp_if_include 10.0.0.0/24" in words
    assert ("oob_tcp_if_include" in words) == (major == 4)
    agent = "--mca plm_rsh_agent rsh -v" if major == 4 else "--prtemca plm_ssh_agent rsh -v"
    assert agent in words
    assert "--prefix /opt/mpi" in words
    assert "-x MINE" in words
    assert "-x TORCHMN_RSH" in words
    assert "UNKNOWN" not in words
    assert f"--mca pml ^yalla {' '.join(worker_command())}" in words


@pytest.mark.parametrize(
    ("mpirun_path", "shell", "problem"),
    [
        ("/opt/my mpi/bin/mpirun", "rsh", "'/opt/my mpi'"),
        ("/opt/mpi/bin/mpirun", "'/opt/my rsh' -v", "'/opt/my rsh'"),
    ],
)
def test_open_mpi_cannot_quote_for_other_hosts(mpirun_path: str, shell: str, problem: str) -> None:
    env = {"TORCHMN_RSH": shell}

    assert open_mpi(on_hosts(), env, mpirun_path).argv[0] == mpirun_path
    with pytest.raises(UnsupportedError, match=problem):
        open_mpi(on_hosts(), env, mpirun_path, route=ROUTE, networks=("10.0.0.0/24",))


@pytest.fixture
def srun_path(tmp_path: Path) -> str:
    (tmp_path / "srun").touch(mode=0o755)
    return str(tmp_path)


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_srun(srun_path: str, backend: str) -> None:
    hosts = (Host(name="a", slots=2), Host(name="b", slots=2))
    command = srun.command(
        job(4, hosts=hosts, backend=backend, launcher_args=("--exclusive",)), {"PATH": srun_path}
    )
    words = " ".join(command.argv)
    assert "--ntasks 4" in words
    assert "--nodes 2 --ntasks-per-node 2 --nodelist a,b" in words
    assert ("--mpi=pmix" in words) == (backend == "mpi")
    assert f"--exclusive {' '.join(worker_command())}" in words


def test_srun_with_unequal_hosts(srun_path: str) -> None:
    words = " ".join(srun.command(on_hosts(), {"PATH": srun_path}).argv)
    assert "--distribution=arbitrary --nodelist a,a,b" in words


def test_missing_srun_raises() -> None:
    with pytest.raises(LaunchError, match="no srun on the PATH"):
        srun.command(on_hosts(), {"PATH": "/nowhere"})
