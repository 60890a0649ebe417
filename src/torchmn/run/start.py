"""Run a job: create its log folder and environment, start its launcher, supervise it."""

import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from torchmn.base.errors import DataError, LaunchError, UsageError
from torchmn.base.log import Log
from torchmn.base.private_files import write_whole
from torchmn.cluster.cpus import available_processors
from torchmn.cluster.environment_variables import PROFILE_VARIABLE, RECORD_VARIABLE, SECRET_VARIABLE
from torchmn.cluster.network import Route, route_to
from torchmn.cluster.units import counted
from torchmn.control import connection as channels
from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.connection import find_free_port
from torchmn.control.heartbeat import heartbeat_limit_s
from torchmn.control.processes import allow_connections
from torchmn.record.merged_trace import finish_profile
from torchmn.run.backend import find_mpirun, open_mpi_session
from torchmn.run.console import RankOutput, open_standard_streams
from torchmn.run.elastic.job import ElasticJob, host_process
from torchmn.run.elastic.launcher import ElasticLauncher
from torchmn.run.host_checks import HostFacts
from torchmn.run.job import Command, Job
from torchmn.run.monitor.job_result import JOB_FILE, LATEST, run_name
from torchmn.run.old_logs import remove_old
from torchmn.run.rank_environment import worker_environment
from torchmn.run.script_input import input_path, terminal_variables
from torchmn.run.starters import local, mpirun, remote, srun, torchrun
from torchmn.run.supervisor import Supervisor

_log = Log(__name__)


def run_job(job: Job, env: Mapping[str, str], *, why: str = "") -> int:
    """Run the job to its end and return its exit code. Call it in the main thread of a process.

    Raises LaunchError: the job could not be started. Raises UsageError: its log folder cannot be
    made.

    >>> import os, sys, tempfile
    >>> from pathlib import Path
    >>> from torchmn.run.plan import RunOptions, plan_job
    >>> from torchmn.run.start import run_job
    >>> options = RunOptions(
    ...     argv=(sys.executable, "-c", "print('trained')"),
    ...     num_ranks=1,
    ...     backend="gloo",
    ...     log_dir=Path(tempfile.mkdtemp()),
    ... )
    >>> job, why = plan_job(options, os.environ)
    >>> run_job(job, os.environ, why=why)
    [0] trained
    0
    """
    heartbeat_limit_s()  # raises before anything has started
    allow_connections(job.num_ranks, f"torchmn run with {job.num_ranks:,} ranks")
    output = RankOutput(*open_standard_streams())
    route = route_between(job)
    facts = _check_hosts(job, worker_environment(job, env))
    listener = channels.listen_on(route.address if route else "127.0.0.1")
    with ExitStack() as stack:
        authenticated = stack.enter_context(
            closing(AuthenticatedListener(listener, secret=job.secret, role=channels.SUPERVISOR))
        )
        base = worker_environment(job, env, supervisor=channels.address_of(listener))
        if job.launcher == "mpirun":
            base |= stack.enter_context(open_mpi_session(env))
        commands = commands_of(job, base, route=route, facts=facts)
        variables = terminal_variables(job, env)
        job = make_log_folder(job)
        reason = f" ({why})" if why else ""
        ranks = counted(job.num_ranks, "rank")
        _log.info(
            "%s with %s%s on %s, logs in %s", ranks, job.backend, reason, _places(job), job.log_dir
        )
        if job.warning:
            _log.warning("%s", job.warning)
        output.start()
        status = Supervisor(job, output, authenticated, variables).run(commands)
    _say_profile(job, env)
    return status


def dry_run(job: Job, env: Mapping[str, str]) -> str:
    """Return the commands of `run_job` in shell syntax, without contacting any host.

    >>> from torchmn.run.plan import RunOptions, plan_job
    >>> from torchmn.run.start import dry_run
    >>> job, _ = plan_job(RunOptions(argv=("python", "train.py"), num_ranks=2), {})
    >>> "train.py" in dry_run(job, {})
    True
    """
    base = worker_environment(job, env, supervisor="HOST:PORT")
    return _shown(job, env, commands_of(job, base, route=route_between(job)))


def run_elastic_job(elastic: ElasticJob, env: Mapping[str, str], *, why: str = "") -> int:
    """Run a job whose hosts may be lost and come back. Returns and raises as `run_job` does.

    >>> import os, sys, tempfile
    >>> from pathlib import Path
    >>> from torchmn.run.plan import RunOptions, plan_elastic
    >>> from torchmn.run.start import run_elastic_job
    >>> options = RunOptions(
    ...     argv=(sys.executable, "-c", "print('trained')"),
    ...     hosts="localhost:1",
    ...     elastic="1:1",
    ...     log_dir=Path(tempfile.mkdtemp()),
    ... )
    >>> elastic, why = plan_elastic(options, os.environ)
    >>> run_elastic_job(elastic, os.environ, why=why)
    [0] trained
    0
    """
    heartbeat_limit_s()
    job = elastic.job
    allow_connections(job.num_ranks + len(job.hosts), f"torchmn run with {job.num_ranks:,} ranks")
    base = worker_environment(elastic.job, env)
    elastic = replace(elastic, job=make_log_folder(elastic.job))
    output, limits = RankOutput(*open_standard_streams()), elastic.limits
    num_hosts = f"{limits.min_hosts} to {limits.max_hosts}"
    if limits.min_hosts == limits.max_hosts:
        num_hosts = str(limits.max_hosts)
    of_hosts = "" if elastic.meeting else f" of {len(job.hosts)}"
    _log.info(
        "%s%s %s with %s%s on %s, logs in %s",
        num_hosts,
        of_hosts,
        "host" if num_hosts == "1" else "hosts",
        job.backend,
        f" ({why})" if why else "",
        ", ".join(map(str, job.hosts)),
        elastic.job.log_dir,
    )
    address = elastic.meeting[0] if elastic.meeting else _address_for(elastic.job)
    if elastic.meeting:
        place = ":".join(map(str, elastic.meeting))
        if limits.is_fixed:
            limit_s = limits.join_timeout_s
            _log.info("waiting at %s for the other hosts, for up to %g s", place, limit_s)
        else:
            _log.info("hosts that know the secret may join at %s", place)
    output.start()
    status = ElasticLauncher(elastic, output, address, base).run()
    _say_profile(elastic.job, env)
    return status


def _say_profile(job: Job, env: Mapping[str, str]) -> None:
    """Combine the profiles of the ranks, as far as this host sees their files."""
    if PROFILE_VARIABLE in env:
        try:
            made = finish_profile(Path(env.get(RECORD_VARIABLE) or job.log_dir))
        except (OSError, DataError) as error:
            _log.warning("the profiles are not put together: %s", error)
            return
        for text in made:
            _log.info("%s", text)


def dry_run_elastic(elastic: ElasticJob, env: Mapping[str, str]) -> str:
    """Return the commands of `run_elastic_job`, without contacting any host.

    >>> from torchmn.run.plan import RunOptions, plan_elastic
    >>> from torchmn.run.start import dry_run_elastic
    >>> options = RunOptions(argv=("python", "train.py"), hosts="localhost:2", elastic="1:1")
    >>> elastic, _ = plan_elastic(options, {})
    >>> "train.py" in dry_run_elastic(elastic, {})
    True
    """
    base = worker_environment(elastic.job, env)
    commands = [
        host_process(elastic, base, host.name, rendezvous="HOST:PORT") for host in elastic.job.hosts
    ]
    return _shown(elastic.job, env, commands)


def _shown(job: Job, env: Mapping[str, str], commands: Sequence[Command]) -> str:
    """Format commands with their input, and the command of every rank with its variables."""
    shown = []
    for command in commands:
        new = {
            name: "..." if name == SECRET_VARIABLE else text
            for name, text in sorted(command.env.items())
            if env.get(name) != text
        }
        variables = [f"{name}={shlex.quote(text)}" for name, text in new.items()]
        shown.append(" ".join([*variables, shlex.join(command.argv)]))
        if command.stdin:
            order = command.stdin.decode().replace(job.secret, "...")
            shown.append(f"  # on its standard input: {order.strip()}")
    exported = [f"{name}={shlex.quote(env[name])}" for name in job.exported]
    script = " ".join([*exported, shlex.join(job.argv)])
    return "\n".join([*shown, f"  # each rank runs, in {job.cwd}: {script}"])


def _address_for(job: Job) -> str:
    """Return an address of this host that, as far as it knows, all hosts of the job can reach."""
    routes = [route_to(host.name) for host in job.hosts]
    outward = [route.address for route in routes if route is not None and not route.is_loopback]
    return outward[0] if outward else "127.0.0.1"


def route_between(job: Job) -> Route | None:
    """Return the route to the job's other hosts, None if there are none. Raises LaunchError."""
    if not job.has_other_hosts:
        return None
    routes = [(host.name, route_to(host.name)) for host in job.hosts]
    unknown = [name for name, route in routes if route is None]
    if unknown:
        raise LaunchError(
            f"No route to {', '.join(unknown)}: check whether the name is correct and known on "
            f"{socket.gethostname()}."
        )
    return next(route for _, route in routes if route is not None and not route.is_loopback)


def commands_of(
    job: Job,
    env: Mapping[str, str],
    *,
    route: Route | None,
    facts: Mapping[str, HostFacts] | None = None,
) -> list[Command]:
    """Return the commands that start all ranks with the job's launcher. Raises LaunchError.

    ``route`` leads from this host to the others; ``facts`` has the facts of each host by name.
    """
    first = (facts or {}).get(job.hosts[0].name)
    path_of_input = input_path(job, env)
    if job.launcher == "local":
        return local.commands(job, env, input_path=path_of_input)
    if job.launcher == "ssh":
        return remote.commands(job, env, input_path=path_of_input)
    if job.launcher == "srun":
        return [srun.command(job, env)]
    if job.launcher == "torchrun":
        return torchrun.commands(
            job,
            env,
            master_addr=job.hosts[0].name if route else "127.0.0.1",
            master_port=first.port if first else 0,
        )
    path = find_mpirun(env)
    if path is None:
        raise LaunchError("No mpirun was found: install torchmn[mpi], or use --backend gloo.")
    flavour, major = mpirun.flavour_of(path)
    return [
        mpirun.command(
            job,
            env,
            mpirun=path,
            flavour=flavour,
            major=major,
            num_cores=len(available_processors().logical),
            is_root=os.geteuid() == 0,
            route=route,
            networks=_networks(route, facts or {}) if route else (),
            input_path=path_of_input,
        )
    ]


def _check_hosts(job: Job, env: Mapping[str, str]) -> dict[str, HostFacts]:
    """Check that the hosts can run the job; return their facts by name. Raises LaunchError."""
    if job.launcher == "srun":
        return {}  # agents are checked when they connect
    if job.has_other_hosts:
        return remote.check_hosts(job, env)
    return {job.hosts[0].name: HostFacts(versions={}, port=find_free_port())}


def _networks(route: Route, facts: Mapping[str, HostFacts]) -> tuple[str, ...]:
    """Return the networks that connect the hosts; if unknown, the network of this host's route."""
    found = [each.network for each in facts.values() if each.network]
    return tuple(dict.fromkeys(found)) or (route.network,)


def _places(job: Job) -> str:
    if not job.has_other_hosts:
        return socket.gethostname()
    return f"{', '.join(map(str, job.hosts))} through {job.launcher}"


def make_log_folder(job: Job) -> Job:
    """Create this run's folder in ``job.log_dir``; return the job with it as its ``log_dir``.

    The file ``job.json`` in it describes the job. In ``job.log_dir`` only the link ``latest``
    changes: it leads to the new folder.
    Raises UsageError: the folder cannot be made.
    """
    try:
        job.log_dir.mkdir(parents=True, exist_ok=True)
        if text := remove_old(job.log_dir, None if job.keep_logs is None else job.keep_logs - 1):
            _log.info("%s", text)
        own = replace(job, log_dir=_new_folder(job.log_dir))
        (own.log_dir / "launcher.log").touch(mode=0o600)
        record = json.dumps(_record(job), indent=1) + "\n"
        write_whole(own.log_dir / JOB_FILE, record.encode())
    except OSError as error:
        raise UsageError(
            f"The log folder {str(job.log_dir)!r} cannot be used: {error.strerror or error}. "
            "Choose another with --log-dir."
        ) from None
    _link(own.log_dir)
    return own


def _new_folder(parent: Path) -> Path:
    """Create and return a new folder in ``parent``."""
    folder = parent / run_name()
    while True:
        # Two hosts that share ``parent`` may have the same process number in the same second.
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            folder = folder.with_name(f"{folder.name}a")
        else:
            return folder


def _link(folder: Path) -> None:
    """Let ``latest`` lead to ``folder``, unless the user has a file or folder of that name."""
    latest, new = folder.parent / LATEST, folder.parent / f".{LATEST}-{folder.name}"
    if latest.exists() and not latest.is_symlink():
        return
    try:
        # Renaming replaces the old link at once: another run never finds it missing.
        new.symlink_to(folder.name)
        new.replace(latest)
    except OSError:  # a file system without links: the folder is in the first message
        new.unlink(missing_ok=True)


def _record(job: Job) -> dict[str, object]:
    return {
        "argv": list(job.argv),
        "cwd": str(job.cwd),
        "host": socket.gethostname(),
        "hosts": [str(host) for host in job.hosts],
        "launcher": job.launcher,
        "num_ranks": job.num_ranks,
        "backend": job.backend,
        "python": sys.version.split()[0],
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
