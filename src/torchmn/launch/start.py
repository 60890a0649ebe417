"""Run a job on this machine: make its folder and its environment, choose its way, supervise it."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing

from torchmn.errors import LaunchError, TopologyError
from torchmn.launch import local, mpirun
from torchmn.launch.detect import find_mpirun
from torchmn.launch.job import Command, Job
from torchmn.launch.screen import Screen
from torchmn.launch.supervisor import Supervisor
from torchmn.topology import available_processors, launched_place

Way = Callable[[Job, Mapping[str, str]], list[Command]]


def run_job(job: Job, env: Mapping[str, str], *, why: str = "") -> int:
    """Run the job to its end and return its exit code. Call it in the main thread of a process.

    Raises TopologyError: this process is itself one of several. Raises LaunchError: the job could
    not be started.
    """
    raise_if_one_of_several(env)
    screen = Screen(sys.stdout, sys.stderr)
    keeper, port = local.reserve_port()
    with closing(keeper):
        base = {
            **job.environment(mpirun.clean_environment(env)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        commands = WAYS[job.transport](job, base)
        _make_log_dir(job)
        screen.say(
            f"{job.num_ranks} worker(s) with {job.backend}{f' ({why})' if why else ''} on "
            f"{socket.gethostname()}, logs in {job.log_dir}"
        )
        return Supervisor(job, screen).run(commands)


def raise_if_one_of_several(env: Mapping[str, str]) -> None:
    """Refuse to start a job in every process of another job."""
    place = launched_place(env)
    if place is not None and place.known_size is not None and place.known_size > 1:
        raise TopologyError(
            f"`torchmn run` was itself started several times: {place}. Start it once, or give the "
            f"script directly to {place.launcher}."
        )


def _through_mpirun(job: Job, env: Mapping[str, str]) -> list[Command]:
    path = find_mpirun(env)
    if path is None:
        raise LaunchError("No mpirun was found: install torchmn[mpi], or use --backend gloo.")
    return [
        mpirun.command(
            job,
            env,
            mpirun=path,
            flavour=mpirun.flavour_of(path),
            num_cores=len(available_processors().logical),
            is_root=os.geteuid() == 0,
        )
    ]


WAYS: dict[str, Way] = {"torch": local.commands, "mpi": _through_mpirun}


def _make_log_dir(job: Job) -> None:
    """Make the folder, without the files of an earlier job in it, and write down what is run."""
    record = {
        "argv": list(job.argv),
        "cwd": str(job.cwd),
        "host": socket.gethostname(),
        "num_ranks": job.num_ranks,
        "backend": job.backend,
        "python": sys.version.split()[0],
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    try:
        job.log_dir.mkdir(parents=True, exist_ok=True)
        for old in (*job.log_dir.glob("rank*.log"), *job.log_dir.glob("rank*.exit.json")):
            old.unlink()
        (job.log_dir / "launcher.log").touch()
        (job.log_dir / "job.json").write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise LaunchError(
            f"The log folder {str(job.log_dir)!r} cannot be used: {error.strerror or error}. "
            "Choose another one with --log-dir."
        ) from None
