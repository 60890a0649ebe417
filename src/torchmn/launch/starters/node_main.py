"""``python -m torchmn.launch.starters.node_main``: start processes on a host.

The commands are read from standard input, a line of JSON.

It exits when all of them have ended, and kills what is left. The processes are agents, which end by
themselves when they lose their supervisor.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from torchmn.control.codec import decode
from torchmn.control.processes import adopt_orphans, kill_descendants
from torchmn.exit_status import shell_code
from torchmn.launch.orders import StartProcesses


def main() -> int:
    """Start, wait, and return the first exit code that is not 0."""
    adopt_orphans()
    order = decode(sys.stdin.readline(), StartProcesses)
    processes = [
        subprocess.Popen(command.argv, env={**os.environ, **command.env}, stdin=subprocess.DEVNULL)
        for command in order.commands
    ]

    def pass_on(signum: int, _: object) -> None:
        for process in processes:
            process.send_signal(signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, pass_on)
    try:
        codes = [process.wait() for process in processes]
    finally:
        kill_descendants(os.getpid())
    return next((shell_code(code) for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
