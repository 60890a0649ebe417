"""``python -m torchmn.run.elastic.host_main``: one host of an elastic job.

Reads its order from the standard input, reports to the rendezvous, and runs torchrun's agent for
the ranks of this host, round after round. It
ends with the job, with the launcher (the end of standard input) and with the rendezvous, and kills
all processes below it.
"""

import hashlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from torchmn.base.errors import LaunchError, TorchmnError
from torchmn.cluster.environment_variables import JOB_VARIABLE, ROUND_VARIABLE, SECRET_VARIABLE
from torchmn.control.authenticated_listener import connect_authenticated
from torchmn.control.codec import Record, decode
from torchmn.control.messages import HostHello, Round
from torchmn.control.processes import adopt_orphans, kill_descendants
from torchmn.run.elastic.host import Host, round_secret
from torchmn.run.elastic.rendezvous import ROLE
from torchmn.run.host_checks import find_problem, versions

_STOP_MARGIN_S = 3.0


class RunHost(Record, frozen=True, kw_only=True):
    """To `torchmn.run.elastic.host_main`: take part in an elastic job as this host."""

    host: str
    slots: int
    secret: str
    rendezvous: str
    cwd: str
    script: str
    grace_s: float
    env: dict[str, str]


class _Signalled(Exception):
    """A signal came while torch's agent, which has its own handlers, did not run yet."""


def main() -> int:
    """Run this host's part of the job; the exit code is 0 if it ended regularly."""
    adopt_orphans()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, _raise_signalled)
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, lambda *_: None)  # the launcher forwards them; not ignored: inherited
    host: list[Host] = []
    try:
        order = decode(sys.stdin.readline(), RunHost)
        os.environ.update(order.env)
        problem = find_problem(order.cwd, order.script)
        if problem:
            raise LaunchError(problem)
        _take_part(order, host)
    except TorchmnError as error:
        return _say(str(error))
    except _Signalled:
        pass
    except Exception as error:
        if type(error).__name__ != "SignalException":  # torch's, which only its agent imports
            raise
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        kill_descendants(os.getpid())
    leave = host[0].leave if host else None
    return _say(leave.text) if leave is not None and leave.text else 0


def _take_part(order: RunHost, hosts: list[Host]) -> None:
    secret = order.secret
    identity = HostHello(host=order.host, slots=order.slots, versions=versions())
    channel = connect_authenticated(order.rendezvous, secret=secret, role=ROLE, identity=identity)
    host = Host(channel, stdin=sys.stdin.fileno())
    hosts.append(host)
    os.environ[JOB_VARIABLE] = hashlib.sha256(f"job {secret}".encode()).hexdigest()

    def on_round(found: Round) -> None:
        os.environ[SECRET_VARIABLE] = round_secret(secret, found.number)
        os.environ[ROUND_VARIABLE] = str(found.number)

    host.start()
    from torchmn.run.elastic.torch_agent import run_agent  # torch, after we have reported

    stop_limit_s = order.grace_s + _STOP_MARGIN_S
    run_agent(host, order.host, order.slots, stop_limit_s=stop_limit_s, on_round=on_round)


def _raise_signalled(signum: int, _: FrameType | None) -> NoReturn:
    raise _Signalled(signum)


def _say(text: str) -> int:
    print(f"torchmn: {text}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
