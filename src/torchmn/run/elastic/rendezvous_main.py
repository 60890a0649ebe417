"""``python -m torchmn.run.elastic.rendezvous_main``: the process of an elastic job's rendezvous.

It runs on the launcher's host or on that of ``--rendezvous``, reads its order from standard input,
prints the address on which it listens, and ends with the job, or when its standard input ends
because the launcher died.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.codec import decode, encode
from torchmn.control.connection import address_of, listen_on
from torchmn.run.elastic.rendezvous import GOODBYE_S, ROLE, Rendezvous
from torchmn.run.elastic.rendezvous_state import RendezvousState
from torchmn.run.orders import RendezvousStarted, ServeRendezvous


def main() -> int:
    """Serve one job."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # the launcher decides what to do
    order = decode(sys.stdin.readline(), ServeRendezvous)
    try:
        listener = listen_on(order.host, order.port)
    except OSError as error:
        _print(RendezvousStarted(error=str(error.strerror or error)))
        return 1
    authenticated = AuthenticatedListener(listener, secret=order.secret, role=ROLE)
    _print(RendezvousStarted(address=address_of(listener), pid=os.getpid()))
    state = RendezvousState(order.hosts, order.limits, now=time.monotonic())
    Rendezvous(authenticated, state, goodbye_s=order.limits.grace_s + GOODBYE_S).run(
        sys.stdin.fileno()
    )
    authenticated.close()
    return 0


def _print(reply: RendezvousStarted) -> None:
    print(encode(reply).decode(), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
