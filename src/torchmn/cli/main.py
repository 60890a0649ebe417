"""The ``torchmn`` command, which ends with one line after an error or Ctrl-C."""

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from torchmn.base.terminal import say


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 2 for an invalid request, 1 if the job did not start."""
    try:
        # Most of the start is this import, during which Ctrl-C may come as well.
        from torchmn.cli.app import run_command

        text, code = run_command(args)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt the exit
        text, code = "interrupted.", 130
    if text:
        say(text)
    sys.exit(code)
