"""Join an elastic job from a host that its launcher does not start.

The user runs one command on each host. That on the host with the address of the launcher starts the
job, and the others wait for it there. They prove that they know the secret of the job, and get from
it what to run; their environment is their own.
"""

import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import closing

from torchmn.base.errors import LaunchError, shell_code
from torchmn.base.log import Log
from torchmn.cluster.gpus import count_gpus
from torchmn.cluster.network import own_routes
from torchmn.cluster.units import counted
from torchmn.control.job_secret import given_secret
from torchmn.run.elastic.host_main import RunHost, take_part
from torchmn.run.elastic.job import parse_elastic
from torchmn.run.job import common_command
from torchmn.run.plan import RunOptions, assign_slots
from torchmn.run.rank_environment import without_launcher

_log = Log(__name__)
_PAUSE_S = 0.5


def join_job(options: RunOptions, env: Mapping[str, str]) -> int:
    """Take part in the job of ``options.meeting`` until it ends; return the exit code.

    That is 130 if Ctrl-C ended it, on any host. Call it in the main thread of a process that does
    nothing else. Raises UsageError: there is no secret, or the options contradict each other.
    Raises LaunchError: the launcher does not answer, or has another secret.
    """
    assert options.meeting is not None  # noqa: S101 - else the job starts here
    host, port = options.meeting
    slots = sum(each.slots for each in assign_slots(options, None, num_gpus=count_gpus(env)))
    _, _, limit_s = parse_elastic(options.elastic or "1:1")
    here = socket.gethostname()
    order = RunHost(
        host=here,
        slots=slots,
        secret=given_secret(env, "--master-addr"),
        rendezvous=f"{host}:{port}",
        env=without_launcher(env),
        node_rank=options.node_rank,
        command=common_command(options.argv, options.script),
    )
    _wait_for_launcher(host, port, limit_s)
    _log.info("%s joins the job at %s:%d with %s", here, host, port, counted(slots, "rank"))
    os.environ.clear()  # what an outer launcher has left does not hold for the ranks
    end = take_part(lambda: order)
    if end.text:
        _log.error("%s is out of the job: %s", here, end.text)
        return 1
    _log.info("the job is over, or this host has left")
    # after SIGTERM a host leaves the job as it should; Ctrl-C here or there interrupts it
    return 0 if end.signum == signal.SIGTERM else shell_code(-end.signum)


def _own_addresses() -> str:
    found = [route.address for route in own_routes() if not route.is_loopback]
    return ", ".join(found) or "no other than its own loopback"


def _wait_for_launcher(host: str, port: int, limit_s: float) -> None:
    """Return when something listens there, as hosts may start in any order. Raises LaunchError."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with closing(socket.create_connection((host, port), timeout=limit_s)):
                return
        except OSError as error:
            if time.monotonic() + _PAUSE_S > deadline:
                raise LaunchError(
                    f"{socket.gethostname()} has not reached the launcher at {host}:{port} within "
                    f"{limit_s:g} s: {error.strerror or error}. Run the same command on the host "
                    f"with that address (this one has {_own_addresses()}), and let the hosts' "
                    "firewalls pass their network."
                ) from None
        time.sleep(_PAUSE_S)
