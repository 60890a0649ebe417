"""From what the user asked for to a job: which hosts, which launcher, which backend, and why."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchmn.control.authenticated_listener import SECRET_VARIABLE
from torchmn.errors import TopologyError, UnknownNameError, UnsupportedError, UsageError
from torchmn.launch.backend import Machine, choose_backend, this_machine
from torchmn.launch.elastic.job import ElasticJob, parse_elastic, parse_rendezvous
from torchmn.launch.elastic.rendezvous_state import Limits
from torchmn.launch.job import THIS_HOST, Backend, Job, Launcher, default_log_dir
from torchmn.topology import (
    Allocation,
    Host,
    LauncherInfo,
    allocation,
    is_this_host,
    parse_hostfile,
    parse_hosts,
    read_launcher_env,
    seat,
)

LAUNCHERS = ("auto", "local", "mpirun", "torchrun", "srun", "ssh")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What the user asked for, ``None`` or ``auto`` where nothing was said; see `torchmn run`."""

    argv: tuple[str, ...]
    script: str = ""
    num_ranks: int | None = None
    hostfile: Path | None = None
    hosts: str | None = None
    num_nodes: int | None = None
    per_node: int | None = None
    launcher: str = "auto"
    launcher_args: tuple[str, ...] = ()
    exported: tuple[str, ...] = ()
    backend: str = "auto"
    num_threads: int | None = None
    shows_binding: bool = False
    log_dir: Path | None = None
    grace_s: float = 5.0
    elastic: str | None = None
    max_restarts: int | None = None
    rendezvous: str | None = None
    join_timeout_s: float | None = None

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """``env`` with the values of ``-x NAME=VALUE`` and the threads. Raises UsageError."""
        if self.num_threads is not None and self.num_threads < 1:
            raise UsageError(f"--threads is a number of at least 1, got {self.num_threads}.")
        given = dict(word.split("=", 1) for word in self.exported if "=" in word)
        if SECRET_VARIABLE in given:
            raise UsageError(
                f"-x {SECRET_VARIABLE}=...: everybody on this host can read command lines. Leave "
                "it out: every job gets a new secret, which travels another way."
            )
        unset = [word for word in self.exported if "=" not in word and word not in env]
        if unset:
            raise UsageError(
                f"-x {unset[0]}: there is no such variable. Set it, or use -x {unset[0]}=VALUE."
            )
        threads = {} if self.num_threads is None else {"OMP_NUM_THREADS": str(self.num_threads)}
        return {**env, **given, **threads}


def detect_existing_rank(wish: RunOptions, env: Mapping[str, str]) -> LauncherInfo | None:
    """The place of this process if a launcher has started it as one of several, else ``None``.

    Then there is nothing to be started. Raises TopologyError: other workers were asked for.
    """
    place = read_launcher_env(env)
    if place is None or place.known_size in (None, 1):
        return None
    lists = wish.hosts is not None or wish.hostfile is not None
    asks = lists or wish.launcher != "auto" or wish.elastic is not None
    if wish.num_ranks not in (None, place.size) or asks:
        raise TopologyError(
            f"`torchmn run` was itself started several times: {place}. Then it runs the script as "
            "that rank, and -n, --hosts, --hostfile, --launcher and --elastic cannot ask for "
            "something else: leave them out, or start `torchmn run` once."
        )
    return place


def plan_job(wish: RunOptions, env: Mapping[str, str]) -> tuple[Job, str]:
    """The job, and in words why its launcher and backend are these. Reads files, changes nothing.

    Raises UsageError, UnknownNameError, UnsupportedError or TopologyError: what was asked for
    cannot be, in itself or here.
    """
    if wish.launcher not in LAUNCHERS:
        raise UnknownNameError("launcher", wish.launcher, LAUNCHERS)
    _raise_if_elastic_options_stand_alone(wish)
    given = allocation(env) if wish.hosts is None and wish.hostfile is None else None
    hosts = assign_slots(wish, given)
    num_ranks = sum(host.slots for host in hosts)
    is_remote = not all(is_this_host(host.name) for host in hosts)
    machine = this_machine(env)
    has_srun = shutil.which("srun", path=env.get("PATH")) is not None
    is_slurms = given is not None and given.scheduler == "Slurm" and is_remote and has_srun
    wanted = "srun" if wish.launcher == "auto" and is_slurms else wish.launcher
    backend, why = _backend(wish.backend, wanted, machine, max(host.slots for host in hosts))
    launcher = _launcher(wanted, backend, is_remote=is_remote)
    _raise_if_they_do_not_fit(launcher, backend, is_remote=is_remote)
    reasons = [why if wish.backend == "auto" else "", str(given) if given else ""]
    job = Job(
        argv=wish.argv,
        script=wish.script,
        num_ranks=num_ranks,
        hosts=hosts if is_remote else (Host(name=THIS_HOST, slots=num_ranks),),
        launcher=launcher,
        launcher_args=wish.launcher_args,
        exported=tuple(word.partition("=")[0] for word in wish.exported),
        backend=backend,
        shows_binding=wish.shows_binding,
        log_dir=wish.log_dir or default_log_dir(),
        grace_s=wish.grace_s,
    )
    return job, "; ".join(reason for reason in reasons if reason)


def plan_elastic(wish: RunOptions, env: Mapping[str, str]) -> tuple[ElasticJob, str]:
    """As `plan_job`, for a job that ``--elastic`` lets go on when hosts are lost and come back.

    Raises UnsupportedError: MPI, or a launcher whose world is fixed.
    """
    least, most = parse_elastic(wish.elastic or "")
    if wish.backend == "mpi" or wish.launcher == "mpirun":
        raise UnsupportedError(
            "--elastic needs a world that can be made anew, and MPI_COMM_WORLD is fixed when "
            "mpirun starts: it can neither shrink nor take in a process that comes later, and "
            "mpirun ends all ranks when one is lost. Use --backend gloo or nccl."
        )
    if wish.launcher not in ("auto", "local", "ssh", "torchrun"):
        raise UnsupportedError(
            f"--elastic starts the hosts itself, and again when they come back, with torchrun's "
            f"agent on each: {wish.launcher} has a fixed set of them. Leave --launcher out."
        )
    if wish.launcher_args:
        raise UnsupportedError("--launcher-args has no launcher to go to with --elastic.")
    given = allocation(env) if wish.hosts is None and wish.hostfile is None else None
    hosts = assign_slots(wish, given)
    if most > len(hosts):
        has_list = given is not None or wish.hosts is not None or wish.hostfile is not None
        cure = "" if has_list else " Without a list of hosts there is this one: --elastic 1:1."
        raise UsageError(
            f"--elastic {wish.elastic} counts hosts, of which there are {len(hosts)}.{cure}"
        )
    limits = Limits(
        least=least,
        most=most,
        grace_s=wish.grace_s,
        max_restarts=3 if wish.max_restarts is None else wish.max_restarts,
        join_timeout_s=120.0 if wish.join_timeout_s is None else wish.join_timeout_s,
    )
    is_remote = not all(is_this_host(host.name) for host in hosts)
    num_ranks = max(host.slots for host in hosts)
    backend, why = _backend(wish.backend, "ssh", this_machine(env), num_ranks)
    job = Job(
        argv=wish.argv,
        script=wish.script,
        num_ranks=sum(host.slots for host in hosts),
        hosts=hosts,
        launcher="ssh" if is_remote else "local",
        exported=tuple(word.partition("=")[0] for word in wish.exported),
        backend=backend,
        shows_binding=wish.shows_binding,
        log_dir=wish.log_dir or default_log_dir(),
        grace_s=wish.grace_s,
    )
    host, port = parse_rendezvous(wish.rendezvous) if wish.rendezvous else ("", 0)
    reasons = [why if wish.backend == "auto" else "", str(given) if given else ""]
    elastic = ElasticJob(job=job, limits=limits, rendezvous=host, rendezvous_port=port)
    return elastic, "; ".join(reason for reason in reasons if reason)


def assign_slots(wish: RunOptions, given: Allocation | None) -> tuple[Host, ...]:
    """The hosts, with as many slots as they get workers.

    Without any list of hosts this one is used, with as many workers as asked for.
    """
    if wish.hosts is not None and wish.hostfile is not None:
        raise UsageError("--hosts and --hostfile are two lists of hosts: give one of them.")
    wanted = {"num_ranks": wish.num_ranks, "num_nodes": wish.num_nodes, "per_node": wish.per_node}
    if wish.hosts is not None:
        return seat(parse_hosts(wish.hosts), **wanted)
    if wish.hostfile is not None:
        try:
            text = wish.hostfile.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"The host file {str(wish.hostfile)!r} cannot be read: {error}."
            ) from None
        return seat(parse_hostfile(text, source=str(wish.hostfile)), **wanted)
    if given is not None:
        return seat(given.hosts, **wanted)
    if (wish.num_nodes or 1) > 1:
        raise UsageError(
            f"--nodes {wish.num_nodes} needs a list of hosts: --hostfile, --hosts, or a job of "
            "PBS, Slurm or Grid Engine, and this is none."
        )
    for number in (wish.num_ranks, wish.per_node):
        if number is not None and number < 1:
            raise UsageError(f"-n is the number of workers: at least 1, got {number}.")
    if None not in (wish.num_ranks, wish.per_node) and wish.num_ranks != wish.per_node:
        raise UsageError(f"-n {wish.num_ranks} contradicts --per-node {wish.per_node} on one host.")
    return (Host(name=THIS_HOST, slots=wish.num_ranks or wish.per_node or 1),)


def _raise_if_elastic_options_stand_alone(wish: RunOptions) -> None:
    for name, value in (
        ("--max-restarts", wish.max_restarts),
        ("--rendezvous", wish.rendezvous),
        ("--join-timeout", wish.join_timeout_s),
    ):
        if value is not None:
            raise UsageError(f"{name} says how --elastic works: give --elastic MIN:MAX, too.")


def _backend(
    wanted: str, launcher: str, machine: Machine, most_on_a_host: int
) -> tuple[Backend, str]:
    """As `choose_backend`, but MPI only where its own mpirun starts the ranks.

    Under srun it must be asked for: whether Slurm has a PMI that this MPI speaks shows only there.
    """
    if wanted == "auto" and launcher not in ("auto", "mpirun"):
        if machine.num_gpus >= most_on_a_host:
            return "nccl", "a GPU for every worker"
        return "gloo", f"no GPU for every worker, and {launcher} is no launcher of MPI"
    return choose_backend(wanted, machine, most_on_a_host)


def _launcher(wanted: str, backend: Backend, *, is_remote: bool) -> Launcher:
    """mpirun for MPI, else ssh or, on one host, none."""
    if wanted != "auto":
        return wanted  # type: ignore[return-value]
    if backend == "mpi":
        return "mpirun"
    return "ssh" if is_remote else "local"


def _raise_if_they_do_not_fit(launcher: Launcher, backend: Backend, *, is_remote: bool) -> None:
    if launcher == "local" and is_remote:
        raise UsageError("--launcher local starts workers on this host only: use ssh or mpirun.")
    if backend == "mpi" and launcher in ("local", "ssh", "torchrun"):
        raise UnsupportedError(
            f"--backend mpi needs an MPI launcher, and {launcher} is none: use --launcher mpirun "
            "or srun, or --backend gloo or nccl."
        )
