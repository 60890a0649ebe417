"""``python -m torchmn.launch.elastic.rendezvous_main``: the process of an elastic job's rendezvous.

It stands on the launcher's host, or on the one that ``--rendezvous`` names, reads its order from
the standard input, says at which address it listens, and ends with the job: when all has been
said, or when the standard input ends since the launcher died.
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
from torchmn.launch.elastic.rendezvous import LAST_WORDS_S, ROLE, Rendezvous
from torchmn.launch.elastic.rendezvous_state import Limits, RendezvousState


def main() -> int:
    """Serve one job."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the launcher says what is to be done
    order = json.loads(sys.stdin.readline())
    try:
        listener = socket.create_server((order["host"], order["port"]), backlog=1024)
    except OSError as error:
        print(json.dumps({"error": f"{error.strerror or error}"}), flush=True)
        return 1
    gate = AuthenticatedListener(listener, secret=order["secret"], role=ROLE)
    print(json.dumps({"address": address_of(listener), "pid": os.getpid()}), flush=True)
    limits = Limits(**order["limits"])
    rounds = RendezvousState(order["hosts"], limits, now=time.monotonic())
    Rendezvous(gate, rounds, goodbye_s=limits.grace_s + LAST_WORDS_S).run(sys.stdin.fileno())
    gate.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
