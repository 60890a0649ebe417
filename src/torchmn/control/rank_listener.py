"""Connections between ranks, made at listeners whose addresses and tokens ranks exchange.

Ranks send each other the token over a connection that they have already. A client must know the
token, and the secret of the job if there is one, so that both sides authenticate each other.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from torchmn.base.errors import LaunchError
from torchmn.cluster.environment_variables import SECRET_VARIABLE
from torchmn.control.authenticated_listener import AuthenticatedListener, connect
from torchmn.control.connection import listen_on


class RankAddress(NamedTuple):
    """Addresses of a rank's listener (best first), its port and token, and the rank's process."""

    hosts: list[str]
    port: int
    token: str
    pid: int

    @property
    def secret(self) -> str:
        """Secret that both sides of a connection must know."""
        return f"{os.environ.get(SECRET_VARIABLE, '')} {self.token}"


def listen_for_ranks(hosts: Sequence[str], role: str) -> tuple[AuthenticatedListener, RankAddress]:
    """Listen on a free port of this host; return the listener and its address for other ranks.

    ``hosts`` are the addresses by which they reach this host. With a single one it listens on that
    interface only, else on all.
    """
    # Of several addresses only the other ranks know which one they reach.
    listener = listen_on(hosts[0] if len(hosts) == 1 else "")
    port, token = listener.getsockname()[1], secrets.token_hex(16)
    address = RankAddress(list(hosts), port, token, os.getpid())
    return AuthenticatedListener(listener, secret=address.secret, role=role), address


def connect_to_rank(
    address: RankAddress, role: str, line: bytes, limit_s: float, *, retries: bool = True
) -> socket.socket | None:
    """Connect to the first of a rank's addresses that answers; return None if none does.

    The last address gets all of the time that is left, each of the others half of it. ``line`` and
    ``retries`` as in `connect`.
    """
    deadline = time.monotonic() + limit_s
    for host in address.hosts:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return None
        with suppress(LaunchError):
            return connect(
                f"{host}:{address.port}",
                secret=address.secret,
                role=role,
                line=line,
                limit_s=left_s if host == address.hosts[-1] else left_s / 2,
                retries=retries,
            )
    return None
