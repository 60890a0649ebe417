"""``python -m torchmn.launch.elastic.rendezvous_main``: the process of an elastic job's rendezvous.

It stands on the launcher's host, or on the one that ``--rendezvous`` names, reads its order from
the standard input, says at which address it listens, and ends with the job: when all has been
said, or when the standard input ends since the launcher died.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.codec import decode, encode
from torchmn.control.connection import address_of
from torchmn.launch.elastic.rendezvous import LAST_WORDS_S, ROLE, Rendezvous
from torchmn.launch.elastic.rendezvous_state import RendezvousState
from torchmn.launch.orders import RendezvousStarted, ServeRendezvous


def main() -> int:
    """Serve one job."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the launcher says what is to be done
    order = decode(sys.stdin.readline(), ServeRendezvous)
    try:
        listener = socket.create_server((order.host, order.port), backlog=1024)
    except OSError as error:
        _print(RendezvousStarted(error=str(error.strerror or error)))
        return 1
    gate = AuthenticatedListener(listener, secret=order.secret, role=ROLE)
    _print(RendezvousStarted(address=address_of(listener), pid=os.getpid()))
    rounds = RendezvousState(order.hosts, order.limits, now=time.monotonic())
    Rendezvous(gate, rounds, goodbye_s=order.limits.grace_s + LAST_WORDS_S).run(sys.stdin.fileno())
    gate.close()
    return 0


def _print(reply: RendezvousStarted) -> None:
    print(encode(reply).decode(), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
