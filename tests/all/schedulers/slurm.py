"""Slurm, as Debian packages it."""

import os
from collections.abc import Mapping

from tests.all.schedulers.cluster import Cluster
from tests.netlab import Host

CORES = 4  # of each node, whatever the machine has
_CONFIGURATION = """
ClusterName=lab
SlurmctldHost={login.name}({login.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=15
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
KillWait=30
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,batch_sched_delay=1,sched_min_interval=100000
{nodes}
PartitionName=debug Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4 \
PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE \
PriorityTier=9 PreemptMode=OFF
"""


class Slurm(Cluster):
    """Two nodes, a partition for all and one that takes nodes away.

    A job that was requeued waits as long as a credential is valid, ``cred_expire``.
    """

    name = "slurm"
    tools = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
    shortest_limit = "00:01:00"
    words_of_limit = "TIMEOUT"
    unknown_queue = "invalid partition specified: nowhere"

    @property
    def variables(self) -> Mapping[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        for name in ("ctld", *(f"spool-{n.name}" for n in self.nodes)):
            (self.folder / name).mkdir()
        for node in self.nodes:
            (self.folder / f"tmp-{node.name}").mkdir()
        (self.folder / "slurm.conf").write_text(self._configuration())
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        munged = ["munged", "--foreground", "--force", "--key-file", key]
        munged += ["--socket", self.folder / "munge.sock", "--pid-file", self.folder / "munged.pid"]
        munged += ["--log-file", self.folder / "munged.log", "--seed-file", self.folder / "seed"]
        self.daemon("munged", self.login, munged)
        self.wait_for(lambda: (self.folder / "munge.sock").exists(), "munge's socket")
        self.daemon("slurmctld", self.login, ["slurmctld", "-D", "-c"])
        for node in self.nodes:
            self.daemon(f"slurmd-{node.name}", node, ["slurmd", "-D", "-c", "-N", node.name])
        self.wait_for(self._is_idle, "idle nodes")

    def cancel(self, job: str) -> None:
        self.ask("scancel", job)

    def send_signal(self, job: str) -> None:
        self.ask("scancel", "--batch", "--signal=USR1", job)

    def has_jobs(self) -> bool:
        return bool(self.ask("squeue", "--noheader").strip())

    def preempt(self, job: str) -> None:
        urgent = ["sbatch", "--parsable", "-p", "urgent", "-N", 2, "-o", "/dev/null"]
        self.ask(*urgent, "--wrap", "sleep 1")

    def fail_node(self, host: Host) -> None:
        self.lab.cut_link(host)

    def repair_node(self, host: Host) -> None:
        self.lab.restore_link(host)
        self.wait_for(self._is_idle, "idle nodes")

    def _configuration(self) -> str:
        nodes = "\n".join(
            f"NodeName={node.name} NodeHostname={node.name} NodeAddr={node.address} CPUs={CORES} "
            "RealMemory=1000 State=UNKNOWN"
            for node in self.nodes
        )
        names = ",".join(node.name for node in self.nodes)
        return _CONFIGURATION.format(login=self.login, folder=self.folder, nodes=nodes, names=names)

    def _is_idle(self) -> bool:
        states = self.run(["sinfo", "-p", "debug", "-hN", "-o", "%T"], self.folder)
        return states.stdout.split() == ["idle"] * len(self.nodes)
