"""The process that makes a lab, holds it, and takes it down when its owner says so or dies.

It is started by the owner and stands in a session of its own, so that a Ctrl-C does not reach it.
It says where the lab is in one line of JSON, then sleeps until its standard input has something
or ends, the owner is gone, or a signal asks it to end. Should it be killed itself, the kernel
removes every namespace without a process, and the next lab on this machine sweeps up the rest.
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

from torchmn.control.processes import signal_socket
from torchmn.errors import TorchmnError
from torchmn.testing.netlab.construction import build
from torchmn.testing.netlab.leftovers import claim_folder, sweep, take_down


def main(text: str) -> None:
    """Keep the lab that ``text``, the owner's order in JSON, describes."""
    order = json.loads(text)
    owner = os.pidfd_open(order["owner"])
    wake = signal_socket(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if os.getppid() != order["owner"]:
        return  # it died before we looked
    folder = None
    try:
        sweep()
        folder = claim_folder(owner=order["owner"], is_standing=order["is_standing"])
        _say(asdict(build(folder, **order["lab"])))
        select.select([sys.stdin, owner, wake], [], [])
    except TorchmnError as error:
        _say({"error": str(error)})
    finally:
        if folder is not None:
            take_down(folder)


def _say(what: Mapping[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the owner died; the rest follows from that
        print(json.dumps(what, default=str), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
