"""The process that creates a lab, holds it, and removes it when its owner ends it or dies.

It is started by the owner in its own session, so that a Ctrl-C does not reach it. It reports the
lab in one line of JSON, then sleeps until its standard input has data or ends, the owner ends, or a
signal arrives. If it is killed itself, the kernel removes every namespace without a process, and
the next lab on this machine removes the rest.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from tests.netlab.cleanup import claim_folder, sweep, take_down
from tests.netlab.construction import build
from torchmn.control.processes import signal_socket
from torchmn.errors import TorchmnError


def main(text: str) -> None:
    """Run the lab that ``text``, the owner's order in JSON, describes."""
    order = json.loads(text)
    owner = os.pidfd_open(order["owner"])
    wake = signal_socket(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if os.getppid() != order["owner"]:
        return  # the owner has died already
    folder = None
    try:
        sweep()
        folder = claim_folder(owner=order["owner"], persistent=order["persistent"])
        _report(asdict(build(folder, **order["lab"])))
        select.select([sys.stdin, owner, wake], [], [])
    except TorchmnError as error:
        _report({"error": str(error)})
    finally:
        if folder is not None:
            take_down(folder)


def _report(report: Mapping[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the owner died, which ends the lab
        print(json.dumps(report, default=str), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
