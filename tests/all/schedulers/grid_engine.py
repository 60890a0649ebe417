"""Grid Engine, as Debian packages it, with a cell of its own in a folder."""

from collections.abc import Mapping
from pathlib import Path

from tests.all.schedulers.cluster import Cluster
from tests.netlab import Host

_PACKAGED = Path("/var/lib/gridengine")
_BOOTSTRAP = """\
admin_user none
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {cell}/common;{folder}/qmaster
binary_path /usr/sbin
qmaster_spool_dir {folder}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""
_CONFIGURATION = {
    "execd_spool_dir": "{folder}/execd",
    "min_uid": "0",
    "min_gid": "0",
    "load_report_time": "00:00:02",
    "max_unheard": "00:00:10",
    "reschedule_unknown": "00:00:05",
    "finished_jobs": "100",
    "reporting_params": "accounting=true reporting=false flush_time=00:00:01 joblog=false "
    "sharelog=00:00:00",
    "qmaster_params": "ENABLE_RESCHEDULE_KILL=1,ENABLE_RESCHEDULE_SLAVE=1",
}
_SCHEDULER = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}


class GridEngine(Cluster):
    """One queue, and parallel environments for two slots on each host."""

    name = "grid_engine"
    shortest_limit = "00:00:20"
    words_of_limit = "h_rt"
    unknown_queue = 'unknown queue "nowhere"'
    signal_options = ("--signal", 265)  # of five minutes
    tools = ("/usr/sbin/sge_qmaster", "/usr/sbin/sge_execd", "qconf", "qsub", "qacct")

    @property
    def variables(self) -> Mapping[str, str]:
        return {
            "SGE_ROOT": str(self.folder / "sge"),
            "SGE_CELL": "lab",
            "SGE_QMASTER_PORT": "6444",
            "SGE_EXECD_PORT": "6445",
            "SGE_CLUSTER_NAME": "lab",
        }

    def start(self) -> None:
        root = self.folder / "sge"
        common = root / "lab" / "common"
        common.mkdir(parents=True)
        for name in ("bin", "lib", "utilbin", "util"):
            (root / name).symlink_to(_PACKAGED / name)
        (self.folder / "qmaster" / "job_scripts").mkdir(parents=True)
        (self.folder / "execd").mkdir()
        text = _BOOTSTRAP.format(cell=root / "lab", folder=self.folder)
        (common / "bootstrap").write_text(text)
        (common / "act_qmaster").write_text(f"{self.login.name}\n")
        tools = Path("/usr/lib/gridengine")
        spool = f"{root / 'lab'}/common;{self.folder}/qmaster"
        self.ask(tools / "spoolinit", "classic", "libspoolc", spool, "init")
        configuration = self._edited(
            Path("/usr/share/gridengine/default-configuration").read_text(), _CONFIGURATION
        )
        defaults = tools / "spooldefaults"
        self.ask(defaults, "configuration", self._file("configuration", configuration))
        resources = Path("/usr/share/gridengine/util/resources")
        self.ask(defaults, "complexes", resources / "centry")
        self.ask(defaults, "usersets", resources / "usersets")
        self.ask(defaults, "managers", "root")
        self.daemon("qmaster", self.login, ["/usr/sbin/sge_qmaster"], SGE_ND="1")
        self.wait_for(lambda: self.run(["qconf", "-sh"], self.folder).returncode == 0, "qmaster")
        self._configure()
        for node in self.nodes:
            self._start_execd(node)
        self.wait_for(lambda: self._are_up(2), "idle nodes")

    def _configure(self) -> None:
        for host in (self.login, *self.nodes):
            self.run(["qconf", "-ah", host.name], self.folder)
            self.run(["qconf", "-as", host.name], self.folder)
        scheduler = self._edited(self.ask("qconf", "-ssconf"), _SCHEDULER)
        self.ask("qconf", "-Msconf", self._file("scheduler", scheduler))
        for index, node in enumerate(self.nodes):
            # all hosts share the machine's processes, which execd finds by these groups
            low = 65000 + 100 * index
            own = f"gid_range {low}-{low + 99}\nmailer /bin/true\nxterm /bin/true\n"
            (self.folder / "conf").mkdir(exist_ok=True)
            (self.folder / "conf" / node.name).write_text(own)
            host = f"hostname {node.name}\nload_scaling NONE\ncomplex_values NONE\n"
            host += "user_lists NONE\nxuser_lists NONE\nprojects NONE\nxprojects NONE\n"
            host += "usage_scaling NONE\nreport_variables NONE\n"
            self.ask("qconf", "-Ae", self._file("host", host))
            self.ask("qconf", "-Aconf", self.folder / "conf" / node.name)
        names = " ".join(node.name for node in self.nodes)
        for name, rule in (("mpi", "$round_robin"), ("pairs", "4")):
            environment = (
                f"pe_name {name}\nslots 999\nuser_lists NONE\nxuser_lists NONE\n"
                "start_proc_args /bin/true\nstop_proc_args /bin/true\n"
                f"allocation_rule {rule}\ncontrol_slaves TRUE\njob_is_first_task FALSE\n"
                "urgency_slots min\naccounting_summary TRUE\nqsort_args NONE\n"
            )
            self.ask("qconf", "-Ap", self._file("pe", environment))
        queue = self.ask("qconf", "-sq")
        # hosts share the machine's /tmp, where each would remove the folder that the other one has
        # made for the job, with Open MPI's files in it
        own = [f"[{node.name}={self.folder / f'tmp-{node.name}'}]" for node in self.nodes]
        for node in self.nodes:
            (self.folder / f"tmp-{node.name}").mkdir(mode=0o1777)
        changes = {
            "tmpdir": ",".join(["/tmp", *own]),
            "qname": "all.q",
            "hostlist": names,
            "slots": "4",
            "pe_list": "mpi pairs",
            "shell_start_mode": "unix_behavior",
            "rerun": "TRUE",
            "notify": "00:00:20",
            "load_thresholds": "NONE",
        }
        self.ask("qconf", "-Aq", self._file("queue", self._edited(queue, changes)))

    def _start_execd(self, node: Host) -> None:
        self.daemon(f"execd-{node.name}", node, ["/usr/sbin/sge_execd"], SGE_ND="1")

    def _are_up(self, number: int) -> bool:
        listed = self.run(["qstat", "-f"], self.folder).stdout
        rows = [line.split() for line in listed.splitlines() if line.startswith("all.q@")]
        # the sixth column is the state, which is empty where all is well
        return len([row for row in rows if len(row) == 5 and row[3] != "-NA-"]) == number

    def _edited(self, text: str, changes: Mapping[str, str]) -> str:
        lines = []
        for line in text.replace("\\\n", " ").splitlines():
            key = line.split(maxsplit=1)[0] if line.strip() else ""
            new = changes.get(key)
            lines.append(line if new is None else f"{key} {new.format(folder=self.folder)}")
        return "\n".join(lines) + "\n"

    def _file(self, name: str, text: str) -> Path:
        path = self.folder / f"{name}.txt"
        path.write_text(text)
        return path

    def cancel(self, job: str) -> None:
        self.ask("qdel", job)

    def send_signal(self, job: str) -> None:
        """The job script does."""

    def has_jobs(self) -> bool:
        return bool(self.ask("qstat").strip())

    def preempt(self, job: str) -> None:
        """Suspend it, as a queue does to the jobs of those that are subordinate to it.

        `qmod -rj` starts a job again at once, and where its former tasks are still known to a host
        this start is lost: Grid Engine tries again five minutes later.
        """
        self.ask("qmod", "-sj", job)
        self.wait_for(lambda: not list((self.folder / "execd").glob("*/active_jobs/*")), "end")
        self.ask("qmod", "-usj", job)

    def fail_node(self, host: Host) -> None:
        self.lab.cut_link(host)

    def repair_node(self, host: Host) -> None:
        self.lab.restore_link(host)
        self.wait_for(lambda: self._are_up(2), "idle nodes")
