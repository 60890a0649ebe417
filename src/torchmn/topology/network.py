"""The address and network interface by which this host reaches another. Sends nothing."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_ANY_PORT = 9  # nothing is sent to it


@dataclass(frozen=True, kw_only=True)
class Route:
    """An own address, the interface that has it, and its network such as ``10.0.0.0/24``."""

    address: str
    interface: str
    network: str

    @property
    def is_loopback(self) -> bool:
        """Whether it only leads to this host."""
        return ipaddress.ip_address(self.address).is_loopback


def route_to(host: str) -> Route | None:
    """The route of packets to ``host``, as the kernel would choose it. Local.

    ``None`` if the name is unknown or there is no route. IPv4 only, as gloo's and MPI's own
    choices can be set for it everywhere.
    """
    address = local_address_for(host)
    return None if address is None else route_of(address)


def local_address_for(host: str) -> str | None:
    """The local address from which packets to ``host`` are sent; ``None`` as for `route_to`.

    It may be a second one of its interface, which `route_of` does not find.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))  # of a datagram socket: only looks up the route
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return None


def route_of(address: str) -> Route | None:
    """The interface that has this address, or ``None``: no interface of this host has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            if _ask(probe, name, _SIOCGIFADDR) == address:
                mask = _ask(probe, name, _SIOCGIFNETMASK) or "255.255.255.255"
                network = ipaddress.ip_network(f"{address}/{mask}", strict=False)
                return Route(address=address, interface=name, network=str(network))
    if ipaddress.ip_address(address).is_loopback:  # 127.0.1.1 is no interface's own
        return Route(address=address, interface="lo", network="127.0.0.0/8")
    return None


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface of this host, or ``None``: it has none, or is not there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return _ask(probe, interface, _SIOCGIFADDR)


def is_this_host(name: str) -> bool:
    """Whether a host name or address is this host's, by name or because packets stay here."""
    if name in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return False
    return route_of(address) is not None


def _ask(probe: socket.socket, interface: str, question: int) -> str | None:
    """An IPv4 address of an interface, by name; ``None`` if it has none."""
    request = struct.pack("256s", interface[:15].encode())
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), question, request)[20:24])
    except OSError:
        return None
