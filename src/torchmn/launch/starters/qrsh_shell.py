"""``python -m torchmn.launch.starters.qrsh_shell HOST COMMAND...``: ssh's place in Grid Engine.

Before it suspends or ends a job that was submitted with ``-notify``, Grid Engine sends SIGUSR1 or
SIGUSR2 to the job script, and to all that `qrsh -inherit` has started on other hosts as well. There
they would end what has no handler for them, such as Open MPI's daemon, before the ranks have saved.
So they are ignored on other hosts: the launcher informs the ranks. Agents handle them again.
"""

from __future__ import annotations

import os
import shlex
import sys

from torchmn.launch.starters.remote import QRSH_COMMAND


def main(args: list[str]) -> None:
    """Become `qrsh`."""
    host, *command = args
    line = f"trap '' USR1 USR2; {' '.join(command)}"
    words = [*QRSH_COMMAND, host, shlex.join(["/bin/sh", "-c", line])]
    os.execvp(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1:])
