"""Start the agents through mpirun, so that ``MPI_COMM_WORLD`` contains all ranks."""

import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from torchmn.base.errors import LaunchError, UnsupportedError
from torchmn.cluster.commands import ask
from torchmn.cluster.environment_variables import RSH_VARIABLE
from torchmn.cluster.network import Route
from torchmn.run.job import Command, Job, worker_command
from torchmn.run.starters.remote import NO_SHELL, is_carried, remote_shell

Flavour = Literal["Open MPI", "Hydra"]


def flavour_of(mpirun: str) -> tuple[Flavour, int]:
    """Return the implementation of this mpirun and its major version, from ``--version``.

    Raises LaunchError: it is unknown, or does not run.
    """
    answer = ask([mpirun, "--version"], limit_s=20)
    if answer.returncode in (124, 127):
        raise LaunchError(f"{mpirun} does not answer --version: {answer.err}. Use --backend gloo.")
    output = answer.out + answer.err
    version = re.search(r"(\d+)\.\d+", output)
    major = int(version[1]) if version else 0
    if "Open MPI" in output or "OpenRTE" in output:
        return "Open MPI", major
    if "HYDRA" in output:
        return "Hydra", major
    first = output.strip().splitlines()[:1]
    raise LaunchError(
        f"{mpirun} is neither Open MPI nor MPICH (it reports {first}). "
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
    route: Route | None = None,
    networks: tuple[str, ...] = (),
    input_path: str = "",
) -> Command:
    """Return the command of one mpirun for all ranks. The agents bind themselves to cores.

    ``route`` leads from this host to the others, if there are others. ``networks``, such as
    ``10.0.0.0/24``, connect the hosts with each other; this host need not be part of them. Raises
    UnsupportedError: the MPI cannot use the remote shell, or cannot be started by it.
    """
    carried = [name for name in env if is_carried(job, name)]
    if flavour == "Hydra":
        options, variables = _hydra(job, env, carried, route)
    else:
        options = ["--host", _hosts_and_slots(job), "--bind-to", "none", "-n", str(job.num_ranks)]
        variables = {}
        if is_root:
            options.insert(0, "--allow-run-as-root")
        if any(host.slots > num_cores for host in job.hosts):
            options += ["--mca", "mpi_yield_when_idle", "1"]  # spinning would starve the others
        if Path(mpirun).parent == Path(sys.executable).parent:
            # Open MPI's wheel looks for fabrics through libfabric, which takes more than a second
            # of MPI_Init and finds nothing that one machine needs. The user's own choice stays.
            variables = {"OMPI_MCA_btl": "^ofi"}
        if route:
            options += _between_hosts(mpirun, env, route, networks, major)
            options += [word for name in carried for word in ("-x", name)]
    options += [*job.launcher_args, *worker_command(input_path)]
    chosen = {name: env.get(name, text) for name, text in variables.items()}
    # ours come last: Hydra loses the last variable of its environment on the way to other hosts
    rest = {name: text for name, text in env.items() if name not in chosen}
    return Command((mpirun, *options), {**rest, **chosen}, name="mpirun")


def _hosts_and_slots(job: Job) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in job.hosts)


def _hydra(
    job: Job, env: Mapping[str, str], carried: Sequence[str], route: Route | None
) -> tuple[list[str], dict[str, str]]:
    """Return options of MPICH's and MVAPICH's mpirun, and variables where no option exists."""
    options, variables = ["-rmk", "user", "-bind-to", "none", "-n", str(job.num_ranks)], {}
    if route is None:
        options += ["-launcher", "fork"]
    else:
        path, words = _hydras_remote_shell(env)
        # as rsh: Hydra would give ssh an option -x, which other remote shells do not have
        options += ["-hosts", _hosts_and_slots(job), "-launcher", "rsh", "-launcher-exec", path]
        options += ["-localhost", route.address, "-genvlist", ",".join(carried)]
        variables["HYDRA_LAUNCHER_EXTRA_ARGS"] = words
    return options, variables


def _hydras_remote_shell(env: Mapping[str, str]) -> tuple[str, str]:
    """Return the remote shell's path and its arguments as text, which Hydra splits at blanks.

    Raises UnsupportedError: an argument has a blank in it, or it does not start a shell.
    """
    name, *words = remote_shell(env)
    path = shutil.which(name, path=env.get("PATH"))
    command = shlex.join([name, *words])
    if path is None:
        raise LaunchError(f"The remote shell {name!r} is not on the PATH: set {RSH_VARIABLE}.")
    if any(" " in word for word in words):
        raise UnsupportedError(
            f"MPICH's mpirun splits the arguments of the remote shell at blanks, and {command} has "
            f"one with a blank: put the command in a script, and name that in {RSH_VARIABLE}."
        )
    if name in NO_SHELL:
        raise UnsupportedError(
            f"MPICH's mpirun needs a remote shell, and {name} does not start a shell on the other "
            "host: use --launcher srun."
        )
    return path, " ".join(words)


def _between_hosts(
    mpirun: str, env: Mapping[str, str], route: Route, networks: tuple[str, ...], major: int
) -> list[str]:
    """Return Open MPI's options for starting daemons on other hosts and choosing networks."""
    if problem := _unquoted(mpirun, env):
        raise UnsupportedError(f"--launcher mpirun: {problem}. Use another launcher.")
    shell = remote_shell(env)
    options = []
    if shell[0] != "srun":  # Slurm's it finds itself
        agent = ("--prtemca", "plm_ssh_agent") if major >= 5 else ("--mca", "plm_rsh_agent")
        options += [*agent, " ".join(shell)]
    used = {"btl_tcp_if_include": networks}
    if major < 5:  # also between the daemons and mpirun
        used["oob_tcp_if_include"] = (*networks, route.network)
    for name, included in used.items():
        if f"OMPI_MCA_{name}" not in env and not any(":" in network for network in included):
            options += ["--mca", name, ",".join(dict.fromkeys(included))]
    if prefix := _prefix(mpirun):
        options += ["--prefix", prefix]
    return options


def _prefix(mpirun: str) -> str:
    """Return the folder of an Open MPI; empty if a remote shell finds it without help."""
    prefix = Path(mpirun).resolve().parent.parent
    if Path(mpirun).parent == Path(sys.executable).parent:
        prefix = Path(mpirun).parent.parent  # the environment, not what its links lead to
    return "" if prefix == Path("/usr") else str(prefix)


def problem_between_hosts(mpirun: str, env: Mapping[str, str]) -> str:
    """Return a known reason why this mpirun cannot start ranks on other hosts, else empty."""
    problem = _unquoted(mpirun, env)
    return problem if problem and flavour_of(mpirun)[0] == "Open MPI" else ""


def _unquoted(mpirun: str, env: Mapping[str, str]) -> str:
    """Return the problem if a path has a blank that Open MPI would not quote, else empty."""
    # It quotes neither its folder on the other hosts nor the words of the remote shell.
    words = [word for word in (_prefix(mpirun), *remote_shell(env)) if " " in word]
    if not words:
        return ""
    return (
        f"Open MPI does not quote {words[0]!r} for other hosts, whose path has a blank: it must be "
        "in a folder without one"
    )
