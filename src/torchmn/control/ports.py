"""Free ports: a port that the system chose, kept until a rank listens on it."""

from __future__ import annotations

import socket

from torchmn.cluster.network import addresses_of_host, family_of


def reserve_port(host: str = "127.0.0.1") -> tuple[socket.socket, int]:
    """A free port of ``host``, empty for all addresses, and the socket that reserves it.

    The socket is bound and does not listen: on Linux a second socket may then bind the same port
    if both set SO_REUSEADDR, as torch's store does, while no other process is given the port. So
    it can stay open for the life of the job.
    """
    keeper = socket.socket(family_of(host), socket.SOCK_STREAM)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind((host, 0))
    port: int = keeper.getsockname()[1]
    return keeper, port


def listen_on(host: str, port: int = 0, *, backlog: int = 1024) -> socket.socket:
    """A listening socket at a name or address, empty for all of IPv4. Raises OSError."""
    address = next(iter(addresses_of_host(host)), host) if host else ""
    return socket.create_server((address, port), family=family_of(address), backlog=backlog)


def find_free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host`` that is free now; another process may take it before it is used."""
    keeper, port = reserve_port(host)
    keeper.close()
    return port
