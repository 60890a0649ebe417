"""Listeners of ranks for other ranks, which are told where they are and with which token.

Who connects knows the token, which the ranks send each other over what connects them already, and
the secret of the job if there is one: so both sides authenticate each other.
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
    """Where a rank listens, best host first, the token of its listener, and its process."""

    hosts: list[str]
    port: int
    token: str
    pid: int

    @property
    def secret(self) -> str:
        """What both sides of a connection must know."""
        return f"{os.environ.get(SECRET_VARIABLE, '')} {self.token}"


def listen_for_ranks(hosts: Sequence[str], role: str) -> tuple[AuthenticatedListener, RankAddress]:
    """A listener on a free port of this host, and what other ranks must know of it.

    ``hosts`` are the addresses at which they reach this host; with one it is on that interface.
    """
    listener = listen_on(hosts[0] if len(hosts) == 1 else "")
    port, token = listener.getsockname()[1], secrets.token_hex(16)
    address = RankAddress(list(hosts), port, token, os.getpid())
    return AuthenticatedListener(listener, secret=address.secret, role=role), address


def connect_to_rank(
    address: RankAddress, role: str, line: bytes, limit_s: float, *, retries: bool = True
) -> socket.socket | None:
    """A connection by the first host that answers in time; None if none does.

    Each but the last has half of the time that is left. ``line`` and ``retries`` as in `connect`.
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
