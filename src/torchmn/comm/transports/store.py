"""A server of torch's TCPStore on a socket that listens already, on an interface of our choice."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

_CAN_TAKE_LISTENER = torch.__version__ >= "2.8"
"""Before, only the older of torch's two servers can."""


def serve_store(
    listener: socket.socket,
    address: str,
    *,
    timeout_s: float,
    num_ranks: int | None = None,
    multi_tenant: bool = False,
) -> TCPStore:
    """Serve a store on ``listener``, which it takes over; torch by itself uses all interfaces.

    Args:
        listener: a TCP socket that listens.
        address: this host's, as the server reaches itself.
        timeout_s: the limit of requests.
        num_ranks: that will connect, if it is known.
        multi_tenant: whether another TCPStore of this process on this port shares the server.
    """
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        num_ranks,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        master_listen_fd=listener.detach(),
        **({} if _CAN_TAKE_LISTENER else {"use_libuv": False}),
    )
