"""Run a job: create its log folder and environment, start its launcher, supervise it."""

import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping
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
from torchmn.control.heartbeat import heartbeat_limit_s
from torchmn.control.processes import allow_connections
from torchmn.record.merged_trace import finish_profile
from torchmn.run.backend import find_mpirun, open_mpi_session
from torchmn.run.console import RankOutput, open_standard_streams
from torchmn.run.elastic.job import host_process
from torchmn.run.elastic.launcher import ElasticLauncher
from torchmn.run.job import Command, Job
from torchmn.run.monitor.job_result import JOB_FILE, LATEST, run_name
from torchmn.run.old_logs import remove_old
from torchmn.run.rank_environment import worker_environment
from torchmn.run.script_input import input_path, terminal_variables
from torchmn.run.starters import local, mpirun, remote, srun
from torchmn.run.supervisor import Supervisor

_log = Log(__name__)


def run_job(job: Job, env: Mapping[str, str], *, why: str = "") -> int:
    """Run the job to its end and return its exit code. Call it in the main thread of a process.

    Hosts of a job with ``limits`` may be lost and come back.

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
    num_hosts = 0 if job.limits is None else len(job.hosts)  # which connect to the launcher as well
    allow_connections(job.num_ranks + num_hosts, f"torchmn run with {job.num_ranks:,} ranks")
    output = RankOutput(*open_standard_streams())
    with ExitStack() as stack:
        supervise = _prepared(job, env, output, stack)
        job = make_log_folder(job)
        what, reason = _what(job), f" ({why})" if why else ""
        _log.info(
            "%s with %s%s on %s, logs in %s", what, job.backend, reason, _places(job), job.log_dir
        )
        if job.warning:
            _log.warning("%s", job.warning)
        if job.limits is not None and job.meeting is not None:
            place = ":".join(map(str, job.meeting))
            if job.limits.is_fixed:
                limit_s = job.limits.join_timeout_s
                _log.info("waiting at %s for the other hosts, for up to %g s", place, limit_s)
            else:
                _log.info("hosts that know the secret may join at %s", place)
        output.start()
        status = supervise(job)
    _say_profile(job, env)
    return status


def _prepared(
    job: Job, env: Mapping[str, str], output: RankOutput, stack: ExitStack
) -> Callable[[Job], int]:
    """Return what runs the job once its log folder is made. Raises LaunchError: it cannot start."""
    if job.limits is not None:
        address = job.meeting[0] if job.meeting else _address_for(job)
        base, limits = worker_environment(job, env), job.limits
        return lambda made: ElasticLauncher(made, limits, output, address, base).run()
    # All that may fail comes before the log folder, which becomes the latest run.
    route = route_between(job)
    networks: tuple[str, ...] = ()
    if route is not None and job.launcher != "srun":  # whose agents are checked when they connect
        networks = remote.check_hosts(job, worker_environment(job, env))
    listener = channels.listen_on(route.address if route else "127.0.0.1")
    authenticated = stack.enter_context(
        closing(AuthenticatedListener(listener, secret=job.secret, role=channels.SUPERVISOR))
    )
    base = worker_environment(job, env, supervisor=channels.address_of(listener))
    if job.launcher == "mpirun":
        base |= stack.enter_context(open_mpi_session(env))
    commands = commands_of(job, base, route=route, networks=networks)
    variables = terminal_variables(job, env)
    return lambda made: Supervisor(made, output, authenticated, variables).run(commands)


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


def dry_run(job: Job, env: Mapping[str, str]) -> str:
    """Return the commands of `run_job` in shell syntax, without contacting any host.

    >>> from torchmn.run.plan import RunOptions, plan_job
    >>> from torchmn.run.start import dry_run
    >>> job, _ = plan_job(RunOptions(argv=("python", "train.py"), num_ranks=2), {})
    >>> "train.py" in dry_run(job, {})
    True
    """
    if job.limits is None:
        base = worker_environment(job, env, supervisor="HOST:PORT")
        commands = commands_of(job, base, route=route_between(job))
    else:
        base = worker_environment(job, env)
        commands = [
            host_process(job, base, host.name, rendezvous="HOST:PORT") for host in job.hosts
        ]
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
    networks: tuple[str, ...] = (),
) -> list[Command]:
    """Return the commands that start all ranks with the job's launcher. Raises LaunchError.

    ``route`` leads from this host to the others; ``networks`` connect them, else that of the route.
    """
    path_of_input = input_path(job, env)
    if job.launcher == "local":
        return local.commands(job, env, input_path=path_of_input)
    if job.launcher == "ssh":
        return remote.commands(job, env, input_path=path_of_input)
    if job.launcher == "srun":
        return [srun.command(job, env)]
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
            networks=networks or ((route.network,) if route else ()),
            input_path=path_of_input,
        )
    ]


def _what(job: Job) -> str:
    """The number of ranks, or of hosts of an elastic job."""
    if job.limits is None:
        return counted(job.num_ranks, "rank")
    least, most = job.limits.min_hosts, job.limits.max_hosts
    number = str(most) if least == most else f"{least} to {most}"
    of_hosts = "" if job.meeting else f" of {len(job.hosts)}"
    return f"{number}{of_hosts} {'host' if number == '1' else 'hosts'}"


def _places(job: Job) -> str:
    names = ", ".join(map(str, job.hosts))
    if job.meeting is not None and not job.has_other_hosts:
        return f"{socket.gethostname()}:{job.hosts[0].slots} and others"
    if job.limits is not None:
        return names
    return f"{names} through {job.launcher}" if job.has_other_hosts else socket.gethostname()


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
