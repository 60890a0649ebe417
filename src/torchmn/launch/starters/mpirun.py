"""Start the agents through mpirun, so that an MPI program finds its world."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torchmn.errors import LaunchError
from torchmn.launch.job import Command, Job, worker_command
from torchmn.launch.starters.remote import is_carried, remote_shell

Flavour = Literal["Open MPI", "Hydra"]


def flavour_of(mpirun: str) -> tuple[Flavour, int]:
    """The implementation of this mpirun and its major version, from ``--version``.

    Raises LaunchError: it is unknown, or does not run.
    """
    try:
        answer = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"{mpirun} does not answer --version: {error}. Use --backend gloo."
        ) from None
    output = answer.stdout + answer.stderr
    version = re.search(r"(\d+)\.\d+", output)
    major = int(version[1]) if version else 0
    if "Open MPI" in output or "OpenRTE" in output:
        return "Open MPI", major
    if "HYDRA" in output or "Intel(R) MPI" in output:
        return "Hydra", major
    first = output.strip().splitlines()[:1]
    raise LaunchError(
        f"{mpirun} is neither Open MPI nor MPICH or Intel MPI (it reports {first}). "
        "Start the script with it directly, or use --backend gloo."
    )


def command(
    job: Job,
    env: Mapping[str, str],
    *,
    mpirun: str,
    flavour: Flavour,
    num_cores: int,
    is_root: bool,
    major: int = 5,
    network: str | None = None,
) -> Command:
    """One mpirun for all ranks. The agents bind themselves to their cores.

    ``network`` connects the hosts, such as ``10.0.0.0/24``; ``None`` if there is only this one.
    """
    count = str(job.num_ranks)
    hosts = ",".join(f"{host.name}:{host.slots}" for host in job.hosts)
    carried = [name for name in env if is_carried(job, name)] if network else []
    if flavour == "Hydra":
        options = ["-rmk", "user", "-bind-to", "none", "-n", count]
        if network:
            # Hydra wants the agent's path alone; what it adds itself is ssh's -x
            options += ["-hosts", hosts, "-launcher", "ssh", "-genvlist", ",".join(carried)]
            options += ["-launcher-exec", remote_shell(env)[0]]
        else:
            options += ["-launcher", "fork"]
    else:
        options = ["--host", hosts, "--bind-to", "none", "-n", count]
        if is_root:
            options.insert(0, "--allow-run-as-root")
        if any(host.slots > num_cores for host in job.hosts):
            options += ["--mca", "mpi_yield_when_idle", "1"]  # spinning would starve the others
        if Path(mpirun).parent == Path(sys.executable).parent:
            # Open MPI's wheel looks for fabrics through libfabric, which takes more than a second
            # of MPI_Init and finds nothing that one machine needs. The user's own choice stays.
            env = {"OMPI_MCA_btl": "^ofi", **env}
        if network:
            options += _between_hosts(mpirun, env, network, major)
            options += [word for name in carried for word in ("-x", name)]
    options += job.launcher_args
    return Command((mpirun, *options, *worker_command()), env, name="mpirun")


def _between_hosts(mpirun: str, env: Mapping[str, str], network: str, major: int) -> list[str]:
    """Options by which Open MPI starts its daemons on other hosts and uses the right network."""
    shell = remote_shell(env)
    options = []
    if shell[0] != "srun":  # Slurm's it finds itself
        agent = ("--prtemca", "plm_ssh_agent") if major >= 5 else ("--mca", "plm_rsh_agent")
        options += [*agent, " ".join(shell)]
    names = ["btl_tcp_if_include", *(["oob_tcp_if_include"] if major < 5 else [])]
    for name in names:
        if f"OMPI_MCA_{name}" not in env:
            options += ["--mca", name, network]
    prefix = Path(mpirun).resolve().parent.parent
    if Path(mpirun).parent == Path(sys.executable).parent:
        prefix = Path(mpirun).parent.parent  # the environment, not what its links lead to
    if prefix != Path("/usr"):  # where a remote shell finds it by itself
        options += ["--prefix", str(prefix)]
    return options
