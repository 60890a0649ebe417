"""``python -m torchmn.launch.elastic.rendezvous_main``: the process of an elastic job's rendezvous.

It runs on the launcher's host or on that of ``--rendezvous``, reads its order from standard input,
prints the address on which it listens, and ends with the job, or when its standard input ends
because the launcher died.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.connection import address_of
from torchmn.launch.elastic.rendezvous import GOODBYE_S, ROLE, Rendezvous
from torchmn.launch.elastic.rendezvous_state import Limits, RendezvousState


def main() -> int:
    """Serve one job."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the launcher decides what to do
    order = json.loads(sys.stdin.readline())
    try:
        listener = socket.create_server((order["host"], order["port"]), backlog=1024)
    except OSError as error:
        print(json.dumps({"error": f"{error.strerror or error}"}), flush=True)
        return 1
    authenticated = AuthenticatedListener(listener, secret=order["secret"], role=ROLE)
    print(json.dumps({"address": address_of(listener), "pid": os.getpid()}), flush=True)
    limits = Limits(**order["limits"])
    state = RendezvousState(order["hosts"], limits, now=time.monotonic())
    Rendezvous(authenticated, state, goodbye_s=limits.grace_s + GOODBYE_S).run(sys.stdin.fileno())
    authenticated.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
