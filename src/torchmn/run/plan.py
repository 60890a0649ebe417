"""Plan a job from the options of `torchmn run`: hosts, launcher and backend, and why."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchmn.base.errors import TopologyError, UnknownNameError, UnsupportedError, UsageError
from torchmn.cluster.allocation import Allocation, allocation, is_scheduled
from torchmn.cluster.cpus import available_processors
from torchmn.cluster.environment_variables import PROFILE_VARIABLE, RECORD_VARIABLE, parse_variable
from torchmn.cluster.gpus import count_gpus
from torchmn.cluster.hostlists import Host, parse_hostfile, parse_hosts, select_hosts
from torchmn.cluster.launcher_env import LauncherInfo, read_launcher_env
from torchmn.cluster.network import is_this_host
from torchmn.cluster.operating_system import require_linux
from torchmn.cluster.units import counted
from torchmn.control.job_secret import given_secret
from torchmn.control.rank_claim import claimed_by
from torchmn.record.profile_request import ProfileRequest, is_record_off
from torchmn.run.backend import BACKENDS, choose_backend, this_machine
from torchmn.run.elastic.job import parse_elastic
from torchmn.run.elastic.rendezvous_state import Limits
from torchmn.run.job import FAILURE_GRACE_S, SIGNAL_GRACE_S, THIS_HOST, Backend, Job, Launcher
from torchmn.run.monitor.job_result import LOG_DIR
from torchmn.run.preemption_notice import checked_source
from torchmn.run.starters.mpirun import problem_between_hosts

_THREADS = "OMP_NUM_THREADS="
LAUNCHERS = ("auto", "local", "mpirun", "srun", "ssh")


def _option(
    text: str,
    *flags: str,
    metavar: str | None = None,
    values: tuple[str, ...] = (),
    default: Any = None,
    **more: object,
) -> Any:
    """Declare a dataclass field as an option of `torchmn run`.

    ``text`` is the help text; without ``flags`` the option is named as the field. ``more`` is
    described in `torchmn.cli.options`.
    """
    metadata = {"help": text, "flags": flags, "metavar": metavar, "values": values, **more}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of `torchmn run`; ``None`` or ``auto`` for those not given.

    >>> from torchmn.run.plan import RunOptions
    >>> options = RunOptions(argv=("python", "train.py"), num_ranks=2)
    >>> options.num_ranks, options.launcher
    (2, 'auto')
    """

    argv: tuple[str, ...]
    script: str = ""
    launcher_args: tuple[str, ...] = ()
    num_ranks: int | None = _option(
        "Number of ranks, or gpu, cpu or auto: one for each GPU or core of this host (default: all "
        "slots of the hosts, else its GPUs, else 1).",
        "-n",
        metavar="N",
        is_text=True,
    )
    hostfile: Path | None = _option("File with a line NAME slots=N for each host.")
    hosts: str | None = _option("Hosts and slots, such as a:4,b:2.")
    num_nodes: int | None = _option("Number of hosts.", "--nodes")
    per_node: int | None = _option(
        "Number of ranks on each host, or gpu, cpu or auto.",
        *("--per-node", "--nproc-per-node"),
        metavar="N",
        is_text=True,
        variable="PET_NPROC_PER_NODE",
    )
    launcher: str = _option(
        "Launcher: auto, local, mpirun, srun or ssh; after it arguments for it, as in "
        "'mpirun --mca pml ^yalla'.",
        values=LAUNCHERS,
        default="auto",
    )
    exported: tuple[str, ...] = _option(
        "Environment variable to export to all ranks (repeatable).",
        "-x",
        metavar="NAME[=VALUE]",
        default=(),
    )
    backend: str = _option(
        "Communication backend: auto, gloo, nccl or mpi.", values=BACKENDS, default="auto"
    )
    log_dir: Path | None = _option(
        "Folder in which this run makes its own for rank0.log, rank0.exit.json, ... "
        "(default: torchmn-logs).",
        variable="PET_LOG_DIR",
    )
    keep_logs: int | None = _option(
        "Keep the folders of the newest N runs there, and remove older ones (default: all stay).",
        metavar="N",
    )
    grace_s: float | None = _option(
        "Seconds between terminating a rank and killing it (default: 5 when the job fails, 30 "
        "after SIGTERM, in a scheduler's job as long as that gives).",
        *("--grace", "--shutdown-timeout"),
        variable="PET_SHUTDOWN_TIMEOUT",
    )
    profile: str | None = _option(
        "Profile these steps of all ranks, or all functions (cProfile). In NAME, of the files, %h, "
        "%r and %p stand for host, rank and process.",
        metavar="FIRST:LAST|cprofile[,NAME]",
    )
    elastic: str | None = _option(
        "Elastic: minimum and maximum number of hosts, and the seconds to wait for MIN (default: "
        "120).",
        metavar="MIN:MAX[:SECONDS]",
    )
    max_restarts: int | None = _option(
        "Maximum restarts of all ranks after a failure (default: 3 with --elastic, else 0).",
        variable="PET_MAX_RESTARTS",
    )
    preemption: str = _option(
        "How a host finds out that it will be preempted: aws, gcp or azure for the address of the "
        "cloud, or a file that then appears.",
        metavar="CLOUD|FILE",
        default="",
    )
    # Address and port at which hosts that are started one by one meet, and the place of this one.
    meeting: tuple[str, int] | None = None
    node_rank: int | None = None
    has_fixed_hosts: bool = False  # their number is fixed: the job ends with any of them
    shown: frozenset[int] | None = None

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return ``env`` with the variables of ``-x`` and ``--profile``. Raises UsageError."""
        exported = dict(parse_variable(text, env) for text in self._all_exported)
        if self.profile is not None:
            ProfileRequest.parse(self.profile)
            if is_record_off({**env, **exported}):
                raise UsageError(
                    f"--profile needs the record of steps, and {RECORD_VARIABLE} switches it off."
                )
        return {**env, **exported}

    @property
    def num_threads(self) -> int | None:
        """Number of threads of each rank by ``-x OMP_NUM_THREADS=...``, None if not given."""
        given = [text.partition("=")[2] for text in self.exported if text.startswith(_THREADS)]
        # The last one counts, as it does in `environment`.
        return int(given[-1]) if given and given[-1].isdecimal() else None

    @property
    def _all_exported(self) -> tuple[str, ...]:
        own = () if self.profile is None else (f"{PROFILE_VARIABLE}={self.profile}",)
        return (*self.exported, *own)

    @property
    def names_hosts(self) -> bool:
        """Whether the options name the hosts, which otherwise are those of a scheduler's job."""
        return self.hosts is not None or self.hostfile is not None

    def job(
        self, hosts: tuple[Host, ...], launcher: Launcher, backend: Backend, env: Mapping[str, str]
    ) -> Job:
        """The job on these hosts."""
        signal_grace_s = math.inf if is_scheduled(env) else SIGNAL_GRACE_S
        return Job(
            argv=self.argv,
            script=self.script,
            num_ranks=sum(host.slots for host in hosts),
            hosts=hosts,
            launcher=launcher,
            launcher_args=self.launcher_args,
            exported=tuple(text.partition("=")[0] for text in self._all_exported),
            backend=backend,
            log_dir=self.log_dir or LOG_DIR,
            preemption=checked_source(self.preemption),
            keep_logs=self.keep_logs,
            grace_s=FAILURE_GRACE_S if self.grace_s is None else self.grace_s,
            signal_grace_s=signal_grace_s if self.grace_s is None else self.grace_s,
            shown=self.shown,
            meeting=self.meeting,
            node_rank=self.node_rank or 0,
        )


def detect_existing_rank(options: RunOptions, env: Mapping[str, str]) -> LauncherInfo | None:
    """Return the rank of this process if a launcher has started it as one of several, else None.

    `torchmn run` then starts no ranks, but runs the script as that rank. A program that a rank has
    started is not a rank itself. Raises TopologyError: the options ask for other ranks.

    >>> options = RunOptions(argv=("torchmn", "run", "train.py"), script="train.py")
    >>> detect_existing_rank(options, {}) is None
    True
    >>> detect_existing_rank(
    ...     options, {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    ... ).rank
    1
    """
    if options.meeting is not None:  # one command on each host, as a task of srun or in a pod
        return None
    place = read_launcher_env(env)
    if place is None or place.known_size in (None, 1) or claimed_by(env) is not None:
        return None
    asks = options.names_hosts or options.launcher != "auto" or options.elastic is not None
    if options.num_ranks not in (None, place.size) or asks:
        raise TopologyError(
            f"`torchmn run` was itself started as one of several ranks: {place}. It then runs the "
            "script as that rank, and -n, --hosts, --hostfile, --launcher and --elastic cannot "
            "change that: leave them out, or start `torchmn run` once."
        )
    return place


def plan_job(options: RunOptions, env: Mapping[str, str]) -> tuple[Job, str]:
    """Return the job and the reasons for its launcher and backend. Reads files, changes nothing.

    It is elastic if the options say how many hosts it needs, or ask for restarts.

    Raises UsageError, UnknownNameError, UnsupportedError or TopologyError: the options contradict
    each other, or cannot work here.

    >>> from torchmn.run.plan import RunOptions, plan_job
    >>> job, why = plan_job(RunOptions(argv=("python", "train.py"), num_ranks=2), {})
    >>> job.num_ranks, job.argv
    (2, ('python', 'train.py'))
    """
    require_linux("torchmn run")
    if options.launcher not in LAUNCHERS:
        raise UnknownNameError("launcher", options.launcher, LAUNCHERS)
    is_elastic = options.elastic is not None or bool(options.max_restarts)
    if is_elastic:
        _check_elastic(options)
    # Hosts that meet run this command each, also as tasks of a scheduler's job.
    given = None if options.names_hosts or options.meeting else allocation(env)
    hosts = assign_slots(options, given, num_gpus=count_gpus(env))
    limits = _limits(options, len(hosts), has_list=given is not None) if is_elastic else None
    is_remote = not all(is_this_host(host.name) for host in hosts)
    has_srun = shutil.which("srun", path=env.get("PATH")) is not None
    is_slurm = given is not None and given.scheduler == "Slurm" and is_remote and has_srun
    wanted = "srun" if options.launcher == "auto" and is_slurm else options.launcher
    starter = wanted if limits is None else "ssh"  # of a host that is lost or joins, too
    backend, reasons = _backend(options, starter, env, hosts, given, is_remote=is_remote)
    launcher = _launcher(wanted if limits is None else "auto", backend, is_remote=is_remote)
    if options.launcher_args and launcher in ("local", "ssh"):
        raise UnsupportedError(
            f"--launcher {launcher} takes no arguments ({' '.join(options.launcher_args)}); mpirun "
            "and srun do. Put options of the remote shell into TORCHMN_RSH."
        )
    if not is_remote and limits is None:
        # Listed under several of its names, it is still one host, whose ranks share memory.
        hosts = (Host(name=THIS_HOST, slots=sum(host.slots for host in hosts)),)
    job = replace(options.job(hosts, launcher, backend, env), limits=limits)
    if job.meeting is not None:
        job = replace(job, secret=given_secret(env, "--master-addr"))
    if not (options.names_hosts or job.has_other_hosts or launcher == "srun"):
        job = replace(job, warning=_warning(job.num_ranks, len(available_processors().logical)))
    return job, reasons


def _warning(num_ranks: int, num_cores: int) -> str:
    """Return a warning if there are more ranks than cores on this host, else an empty string."""
    if num_ranks <= num_cores:
        return ""
    return (
        f"warning: {num_ranks} ranks share {counted(num_cores, 'core')}, so that they slow each "
        f"other down: start at most {num_cores} on this host, or more hosts with --hosts."
    )


def _check_elastic(options: RunOptions) -> None:
    """Raise UnsupportedError: MPI, or a launcher with a fixed set of hosts, cannot be elastic."""
    if options.backend == "mpi" or options.launcher == "mpirun":
        raise UnsupportedError(
            "--elastic does not work with MPI: MPI_COMM_WORLD is fixed when mpirun starts, can "
            "neither shrink nor grow, and mpirun ends all ranks when one is lost. Use --backend "
            "gloo or nccl."
        )
    if options.launcher not in ("auto", "local", "ssh"):
        raise UnsupportedError(
            "--elastic starts the hosts itself, and restarts them when they come back: "
            f"{options.launcher} has a fixed set of hosts. Leave --launcher out."
        )
    if options.launcher_args:
        raise UnsupportedError(
            "Arguments of --launcher have no effect with --elastic: leave them out."
        )


def _limits(options: RunOptions, num_hosts: int, *, has_list: bool) -> Limits:
    """Return the limits of an elastic job; all hosts, if the options ask for restarts only.

    Raises UsageError: there are fewer hosts, and no others can join.
    """
    text = options.elastic or f"{num_hosts}:{num_hosts}"
    min_hosts, max_hosts, join_timeout_s = parse_elastic(text)
    if max_hosts > num_hosts and options.meeting is None:
        largest = f"--elastic {min(min_hosts, num_hosts)}:{num_hosts}"
        cure = f"Use {largest}, or name more hosts."
        if not (has_list or options.names_hosts):
            cure = f"Name them with --hosts or --hostfile; without a list there is only {largest}."
        cure += " Or let others join: give --master-addr, an address of this host that they reach."
        raise UsageError(
            f"--elastic {text} asks for up to {max_hosts} hosts, but there are {num_hosts}. {cure}"
        )
    return Limits(
        min_hosts=min_hosts,
        max_hosts=max_hosts,
        grace_s=FAILURE_GRACE_S if options.grace_s is None else options.grace_s,
        max_restarts=3 if options.max_restarts is None else options.max_restarts,
        join_timeout_s=join_timeout_s,
        is_fixed=options.has_fixed_hosts,
    )


def assign_slots(
    options: RunOptions, given: Allocation | None, *, num_gpus: int = 0
) -> tuple[Host, ...]:
    """Return the hosts with the number of ranks on each; this host if none are given.

    This host, which has ``num_gpus``, gets a rank for each GPU, or one, if no number is given.

    Raises UsageError: the options contradict each other, or the host file cannot be read.
    """
    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("--hosts and --hostfile are mutually exclusive: use one of them.")
    wanted = {
        "num_ranks": options.num_ranks,
        "num_nodes": options.num_nodes,
        "per_node": options.per_node,
    }
    if options.hosts is not None:
        return select_hosts(parse_hosts(options.hosts), **wanted)
    if options.hostfile is not None:
        path = str(options.hostfile)
        try:
            text = options.hostfile.read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise UsageError(
                f"The host file {path!r} cannot be read ({why}): name another with --hostfile, or "
                "the hosts themselves with --hosts a:4,b:2."
            ) from None
        return select_hosts(parse_hostfile(text, source=path), **wanted)
    if given is not None:
        return select_hosts(given.hosts_for(options.num_threads), **wanted)
    if (options.num_nodes or 1) > 1:
        raise UsageError(
            f"--nodes {options.num_nodes} needs a list of hosts: use --hostfile or --hosts, start "
            "it in a job of PBS, Slurm or Grid Engine, or start it on each host with --nnodes "
            f"{options.num_nodes} --node-rank K --master-addr ADDRESS."
        )
    if None not in (options.num_ranks, options.per_node) and options.num_ranks != options.per_node:
        raise UsageError(
            f"-n {options.num_ranks} contradicts --per-node {options.per_node} on one host."
        )
    slots = max(1, options.num_ranks or options.per_node or num_gpus or 1)
    return select_hosts([Host(name=THIS_HOST, slots=slots)], **wanted)


def _backend(
    options: RunOptions,
    launcher: str,
    env: Mapping[str, str],
    hosts: tuple[Host, ...],
    given: Allocation | None,
    *,
    is_remote: bool,
) -> tuple[Backend, str]:
    """Return the backend that `choose_backend` selects, and the reasons for it and for the hosts.

    MPI is only chosen where its own mpirun starts the ranks. Under srun it must be requested:
    whether Slurm has a PMI that this MPI supports only shows there.
    """
    machine, problem = this_machine(env), ""
    if options.backend == "auto" and launcher not in ("auto", "mpirun"):
        problem = "mpirun does not start the ranks"
    elif is_remote and machine.mpirun and launcher != "srun":
        problem = problem_between_hosts(machine.mpirun, env)
    most_ranks = max(host.slots for host in hosts)
    backend, why = choose_backend(options.backend, machine, most_ranks, mpi_problem=problem)
    reasons = [why if options.backend == "auto" else "", str(given) if given else ""]
    return backend, "; ".join(reason for reason in reasons if reason)


def _launcher(wanted: str, backend: Backend, *, is_remote: bool) -> Launcher:
    """Return the launcher: for ``auto``, mpirun with MPI, else ssh or, on one host, local.

    Raises UsageError or UnsupportedError: the launcher starts no other hosts, or not this backend.
    """
    if wanted == "auto" and backend == "mpi":
        return "mpirun"
    if wanted == "auto":
        return "ssh" if is_remote else "local"
    if wanted == "local" and is_remote:
        raise UsageError("--launcher local starts ranks on this host only: use ssh or mpirun.")
    if backend == "mpi" and wanted in ("local", "ssh"):
        raise UnsupportedError(
            f"--backend mpi needs an MPI launcher, which {wanted} is not: use --launcher mpirun "
            "or srun, or --backend gloo or nccl."
        )
    return wanted  # type: ignore[return-value]
