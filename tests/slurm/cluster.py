"""A real Slurm on one machine: a login host with the controller, and compute hosts of a lab."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torchmn
from torchmn.testing.netlab import Host, Lab, missing_requirement, netlab

TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
PATIENCE_S = 60
CONFIGURATION = """
ClusterName=lab
SlurmctldHost={login.name}({login.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=5
{nodes}
PartitionName=debug Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def why_no_slurm() -> str | None:
    """Why no cluster can be made here, or ``None`` if it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_path()) is None]
    if missing:
        return f"no {', '.join(missing)}: 'make test-slurm' installs Slurm and runs these tests"
    return missing_requirement()


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Cluster:
    """A login host and two compute hosts."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.login, *self.nodes = lab.hosts
        self.folder = folder
        self._daemons: list[subprocess.Popen[str]] = []

    @property
    def env(self) -> dict[str, str]:
        """What a user of the cluster has."""
        return {
            **{name: text for name, text in os.environ.items() if not name.startswith("SLURM")},
            "PATH": f"{Path(sys.executable).parent}:{_path()}",
            "PYTHONPATH": str(Path(torchmn.__file__).parents[1]),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }

    def run(
        self, command: Sequence[object], cwd: Path, timeout_s: float = 120, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login host."""
        process = self.login.popen(
            [str(word) for word in command],
            env={**self.env, **env},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def start(self) -> None:
        """Start munge, the controller and the daemons, and wait until all nodes are idle."""
        for name in ("ctld", *(f"spool-{n.name}" for n in self.nodes)):
            (self.folder / name).mkdir()
        for node in self.nodes:
            (self.folder / f"tmp-{node.name}").mkdir()
        (self.folder / "slurm.conf").write_text(self._configuration())
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.folder.chmod(0o755)
        munged = ["munged", "--foreground", "--force", "--key-file", key]
        munged += ["--socket", self.folder / "munge.sock", "--pid-file", self.folder / "munged.pid"]
        munged += ["--log-file", self.folder / "munged.log", "--seed-file", self.folder / "seed"]
        self._daemon(self.login, munged)
        self._wait_for(lambda: (self.folder / "munge.sock").exists(), "munge's socket")
        self._daemon(self.login, ["slurmctld", "-D", "-c"])
        for node in self.nodes:
            self._daemon(node, ["slurmd", "-D", "-c", "-N", node.name])
        self._wait_for(self._is_idle, "idle nodes")

    def stop(self) -> None:
        """End all daemons; the lab ends what they started."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)

    def _configuration(self) -> str:
        nodes = "\n".join(
            f"NodeName={node.name} NodeHostname={node.name} NodeAddr={node.address} CPUs=2 "
            "RealMemory=1000 State=UNKNOWN"
            for node in self.nodes
        )
        names = ",".join(node.name for node in self.nodes)
        return CONFIGURATION.format(login=self.login, folder=self.folder, nodes=nodes, names=names)

    def _daemon(self, host: Host, command: Sequence[object]) -> None:
        with open(self.folder / "daemons.log", "a") as log:
            self._daemons.append(
                host.popen([str(word) for word in command], env=self.env, stdout=log, stderr=log)
            )

    def _is_idle(self) -> bool:
        states = self.run(["sinfo", "--noheader", "--Node", "--format", "%T"], self.folder)
        return states.stdout.split() == ["idle"] * len(self.nodes)

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                logs = {path.name: path.read_text()[-2000:] for path in self.folder.glob("*.log")}
                raise TimeoutError(f"No {what} within {PATIENCE_S} s: {logs}")
            time.sleep(0.2)


@contextmanager
def slurm(folder: Path) -> Iterator[Cluster]:
    """A cluster of two nodes for the length of a block."""
    with netlab(3, None) as lab:
        cluster = Cluster(lab, folder)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
