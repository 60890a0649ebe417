"""``python -m torchmn.run.starters.node_main``: start processes on a host.

The commands are read from standard input, a line of JSON.

It exits when all of them have ended, and kills what is left. The processes are agents, which end by
themselves when they lose their supervisor.
"""

import os
import signal
import subprocess
import sys
import time

from torchmn.base.errors import shell_code
from torchmn.control.codec import Record, decode
from torchmn.control.heartbeat import LoopClock, heartbeat_limit_s
from torchmn.control.processes import StoppedProcesses, adopt_orphans, is_stopped, kill_descendants

_PERIOD_S = 0.05
_STOPPED_LIMITS = 2


class ProcessOrder(Record, frozen=True, kw_only=True):
    """A command, and the variables to add to the environment on the host."""

    argv: list[str]
    env: dict[str, str]


class StartProcesses(Record, frozen=True, kw_only=True):
    """Order to `torchmn.run.starters.node_main`: start these commands."""

    commands: list[ProcessOrder]


def main() -> int:
    """Start the commands, wait for all, and return the first exit code that is not 0."""
    adopt_orphans()
    order = decode(sys.stdin.readline(), StartProcesses)
    processes: list[subprocess.Popen[bytes]] = []
    received: list[int] = []  # signals, of which processes that start later know nothing

    def pass_on(signum: int, _: object) -> None:
        received.append(signum)
        for process in processes:
            process.send_signal(signum)

    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signum = signal.Signals[name]
        signal.signal(signum, pass_on)
    try:
        for command in order.commands:
            env = {**os.environ, **command.env}
            processes.append(subprocess.Popen(command.argv, env=env, stdin=subprocess.DEVNULL))
            for early in received:
                processes[-1].send_signal(early)
        codes = _wait(processes)
    finally:
        kill_descendants(os.getpid())
    return next((shell_code(code) for code in codes if code), 0)


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for all processes and return their return codes.

    Kills a process that stays stopped twice as long as its supervisor needs to notice it.
    """
    clock, limit_s = LoopClock(), _STOPPED_LIMITS * heartbeat_limit_s()
    stopped = StoppedProcesses[subprocess.Popen[bytes]]()
    while running := [process for process in processes if process.poll() is None]:
        now = clock.tick()
        stopped.update((process for process in running if is_stopped(process.pid)), now)
        for process in stopped.for_longer_than(limit_s, now):
            process.kill()
        time.sleep(_PERIOD_S)
    return [process.wait() for process in processes]


if __name__ == "__main__":
    sys.exit(main())
