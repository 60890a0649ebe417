"""Connections that end when the other host is gone, though nobody there could say so."""

from __future__ import annotations

import os
import socket

LOST_AFTER_S = 8
"""How long a host may be silent. Its kernel answers, so a busy process there is not lost."""
_PROBE_PERIOD_S = 2


def end_with_host(connection: int) -> None:
    """Let a connection, by its descriptor, fail if nothing comes from the other host for long."""
    with socket.socket(fileno=os.dup(connection)) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _PROBE_PERIOD_S),
            ("TCP_KEEPINTVL", _PROBE_PERIOD_S),
            ("TCP_KEEPCNT", LOST_AFTER_S // _PROBE_PERIOD_S - 1),
            ("TCP_USER_TIMEOUT", 1000 * LOST_AFTER_S),  # for what was sent and not acknowledged
        ):
            if hasattr(socket, name):
                same.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
