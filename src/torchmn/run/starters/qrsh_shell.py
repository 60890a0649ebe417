"""``python -m torchmn.run.starters.qrsh_shell HOST COMMAND...``: a remote shell for Grid Engine.

Before it suspends or ends a job that was submitted with ``-notify``, Grid Engine sends SIGUSR1 or
SIGUSR2 to all that `qrsh -inherit` has started on other hosts, as well as to the job script. They
would end what has no handler for them, such as Open MPI's daemon, before the ranks have saved. So
they are ignored there: the launcher informs the ranks, whose agents have handlers.
"""

import os
import shlex
import sys

from torchmn.run.starters.remote import QRSH_COMMAND


def main(args: list[str]) -> None:
    """Replace this process by `qrsh`, with SIGUSR1 and SIGUSR2 ignored on the host."""
    host, *command = args
    line = shlex.join(["/bin/sh", "-c", f"trap '' USR1 USR2; {' '.join(command)}"])
    words = [*QRSH_COMMAND, host, line]
    os.execvp(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1:])
