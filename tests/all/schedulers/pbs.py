"""OpenPBS, as `scripts/setup_openpbs.sh` builds it, with a home of its own on every host."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.all.schedulers.cluster import Cluster
from tests.netlab import Host

_USER = "daemon"
_RIGHTS = "+dac_override,+dac_read_search,+net_bind_service"  # the last for pbs_iff
# Jobs have a user, since pbs_mom sees no process of root, and takes such a job for ended when it
# signals it. This user may read and write what root may: the checkout, and the tests' folders.
_WITH_ACCESS = (
    *("setpriv", f"--inh-caps={_RIGHTS}", f"--ambient-caps={_RIGHTS}"),
    "--securebits=+no_setuid_fixup",
)
PREFIX = Path(os.environ.get("OPENPBS_PREFIX", "/opt/openpbs"))
_CONF = """\
PBS_EXEC={prefix}
PBS_SERVER={server}
PBS_HOME={home}
PBS_START_SERVER={is_server}
PBS_START_SCHED={is_server}
PBS_START_COMM={is_server}
PBS_START_MOM={is_node}
PBS_LEAF_NAME={name}
PBS_CORE_LIMIT=0
"""
_SETTINGS = """\
set server acl_roots = root
set server job_history_enable = True
set server flatuid = True
set server scheduling = True
set server scheduler_iteration = 2
set server node_fail_requeue = 5
set server managers = root@*
set queue workq kill_delay = 30
"""


class PBS(Cluster):
    """One queue, and two virtual cores on each node."""

    name = "pbs"
    path = f"{PREFIX}/bin:{PREFIX}/sbin"
    shortest_limit = "00:00:20"
    words_of_limit = "exceeded its walltime"
    unknown_queue = "Unknown queue"
    signal_options = ("--signal", 265)  # of five minutes
    as_user = (*_WITH_ACCESS, *(f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"))
    tools = ("setpriv", "pbs_server", "pbs_mom", "pbs_tmrsh", "qmgr", "pbs_sched")

    @property
    def variables(self) -> Mapping[str, str]:
        return {"PBS_CONF_FILE": str(self._conf(self.login)), "HOME": str(self.folder / "home")}

    def _conf(self, host: Host) -> Path:
        return self.folder / f"pbs-{host.name}.conf"

    def start(self) -> None:
        (self.folder / "home").mkdir()
        # its database runs as another user, who must reach it, and no parent may be writable by all
        self.home = Path(tempfile.mkdtemp(dir="/var/spool", prefix="torchmn-pbs-"))
        self.home.chmod(0o755)
        for host in (self.login, *self.nodes):
            is_node = int(host is not self.login)
            text = _CONF.format(
                prefix=PREFIX,
                server=self.login.name,
                home=self.home / host.name,
                is_server=1 - is_node,
                is_node=is_node,
                name=host.name,
            )
            self._conf(host).write_text(text)
            done = host.run(
                [PREFIX / "libexec" / "pbs_habitat"],
                env={**self.env, "PBS_CONF_FILE": str(self._conf(host))},
                cwd=self.folder,
                check=False,
            )
            (self.folder / f"habitat-{host.name}.log").write_text(done.stdout + done.stderr)
            assert done.returncode == 0, done.stdout + done.stderr
        for name in ("comm", "sched", "server"):
            daemon = PREFIX / "sbin" / f"pbs_{name}"
            self.daemon(name, self.login, [daemon, "-N"])
        self.wait_for(
            lambda: self.run(["qmgr", "-c", "list server"], self.folder).returncode == 0, "server"
        )
        for line in _SETTINGS.splitlines():
            self.ask("qmgr", "-c", line)
        for node in self.nodes:
            config = self.home / node.name / "mom_priv" / "config"
            # hosts share the machine's /var/tmp, where each makes a folder for the job
            own = self.home / node.name / "tmp"
            own.mkdir(mode=0o1777)
            lines = [f"$clienthost {self.login.name}", "$usecp *:/ /", f"$tmpdir {own}"]
            config.write_text("\n".join(lines) + "\n")
            self._start_mom(node)
            self.ask("qmgr", "-c", f"create node {node.name} resources_available.ncpus=4")
        self.wait_for(self._are_free, "free nodes")

    def _start_mom(self, node: Host) -> None:
        conf = str(self._conf(node))
        command = [*_WITH_ACCESS, PREFIX / "sbin" / "pbs_mom", "-N"]
        self.daemon(f"mom-{node.name}", node, command, PBS_CONF_FILE=conf)

    def _are_free(self) -> bool:
        done = self.run(["pbsnodes", "-a"], self.folder)
        return done.stdout.count("state = free\n") == len(self.nodes)

    def stop(self) -> None:
        super().stop()
        env = {**self.env, "PBS_CONF_FILE": str(self._conf(self.login))}
        self.login.run(
            [PREFIX / "sbin" / "pbs_dataservice", "stop"], env=env, cwd=self.folder, check=False
        )
        shutil.rmtree(self.home, ignore_errors=True)

    def cancel(self, job: str) -> None:
        self.ask("qdel", job)

    def send_signal(self, job: str) -> None:
        """The job script does: `qsig` would end the login shell in which that runs."""

    def has_jobs(self) -> bool:
        return bool(self.ask("qstat").strip())

    def preempt(self, job: str) -> None:
        self.ask("qrerun", job)

    def fail_node(self, host: Host) -> None:
        self.lab.cut_link(host)

    def repair_node(self, host: Host) -> None:
        self.lab.restore_link(host)
        self.wait_for(self._are_free, "free nodes")
