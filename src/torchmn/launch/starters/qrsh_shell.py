"""``python -m torchmn.launch.starters.qrsh_shell HOST COMMAND...``: ssh's place in Grid Engine.

Before it suspends or ends a job that was submitted with ``-notify``, Grid Engine sends SIGUSR1 or
SIGUSR2 to all that `qrsh -inherit` has started on other hosts, as well as to the job script.
"""

from __future__ import annotations

import os
import shlex
import sys

from torchmn.launch.starters.remote import IGNORE_WARNINGS, QRSH_COMMAND


def main(args: list[str]) -> None:
    """Become `qrsh`."""
    host, *command = args
    line = shlex.join(["/bin/sh", "-c", IGNORE_WARNINGS + " ".join(command)])
    words = [*QRSH_COMMAND, host, line]
    os.execvp(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1:])
