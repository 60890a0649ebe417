"""Find the address and network interface by which this host reaches another. Sends nothing.

Addresses are text. For a name with both IPv4 and IPv6 addresses the IPv4 address is used.
"""

import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torchmn.base.errors import UsageError
from torchmn.cluster.gpus import text_of

_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_ANY_PORT = 9  # nothing is sent to it


@dataclass(frozen=True, kw_only=True)
class Route:
    """An address of this host, its interface, and its network such as ``10.0.0.0/24``.

    >>> from torchmn.cluster.network import Route
    >>> Route(address="10.0.0.2", interface="eth0", network="10.0.0.0/24").interface
    'eth0'
    """

    address: str
    interface: str
    network: str

    @property
    def is_loopback(self) -> bool:
        """Whether the route only leads to this host."""
        return is_loopback(self.address)


def addresses_of_host(host: str) -> list[str]:
    """Resolve a name or address; IPv4 addresses come first. Empty if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return sorted(addresses, key=lambda address: ":" in address)


def family_of(address: str) -> socket.AddressFamily:
    """Return the socket family of an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Whether a name or address is a loopback one, by which a host reaches itself. Local."""
    found = addresses_of_host(host)
    return bool(found) and ipaddress.ip_address(found[0].partition("%")[0]).is_loopback


def route_to(host: str) -> Route | None:
    """Return the route that the kernel chooses for packets to ``host``. Local.

    None if the name is unknown or there is no route.

    >>> from torchmn.cluster.network import route_to
    >>> route_to("127.0.0.1").address
    '127.0.0.1'
    """
    address = local_address_for(host)
    return None if address is None else route_of(address)


def local_address_for(host: str) -> str | None:
    """Return the local address from which packets to ``host`` are sent; None as for `route_to`.

    It may be a second address of its interface, which `route_of` does not find.

    Example:
        >>> local_address_for("127.0.0.1")
        '127.0.0.1'
    """
    for address in addresses_of_host(host):
        with suppress(OSError), socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))  # of a datagram socket: only looks up the route
            return str(probe.getsockname()[0])
    return None


def local_address_among(hosts: Iterable[str]) -> str | None:
    """Return the local address from which this host reaches the other ``hosts``, or None.

    The first of ``hosts`` that is not this host decides; None if there is no other.

    >>> from torchmn.cluster.network import local_address_among
    >>> local_address_among(["127.0.0.1"])
    """
    other = next((name for name in hosts if not is_this_host(name)), None)
    return None if other is None else local_address_for(other)


def route_of(address: str) -> Route | None:
    """Return the route with this local address, None if no interface of this host has it.

    Example:
        >>> route_of("192.0.2.1") is None  # no interface has it
        True
    """
    for route in _routes(family_of(address)):
        if route.address == address:
            return route
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:  # 127.0.1.1: no interface's own
        return Route(address=address, interface="lo", network="127.0.0.0/8")
    return None


def rate_bytes_per_s(rate: str) -> float:
    """Convert a rate such as ``1gbit``, ``100mbit`` or ``2.5gbit`` to bytes per second.

    Raises UsageError: it is not a positive number of ``bit``, ``kbit``, ``mbit`` or ``gbit``.

    >>> rate_bytes_per_s("100mbit")
    12500000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    bytes_per_s = float(match[1]) * _FACTORS[match[2]] / 8 if match else 0.0
    if bytes_per_s <= 0:
        raise UsageError(
            f"The rate {rate!r} is not a positive number of bits per second. "
            "Write it as '1gbit', '100mbit' or '64kbit'."
        )
    return bytes_per_s


def own_routes() -> list[Route]:
    """Return all addresses of this host as routes, except link-local ones of IPv6."""
    routes = chain(_routes(socket.AF_INET), _routes(socket.AF_INET6))
    return [route for route in routes if not route.address.startswith("fe80:")]  # needs a scope


def address_of(interface: str) -> str | None:
    """Return the address of an interface; None if it has none or does not exist."""
    return next((each.address for each in own_routes() if each.interface == interface), None)


def nominal_speed(interface: str) -> float:
    """Return the nominal speed of an adapter in bytes per second; 0 if it reports none.

    Also 0 for virtual adapters, such as bridges and those of containers, whose speed means nothing.
    """
    folder = Path("/sys/class/net") / interface
    megabits = text_of(folder / "speed")
    is_known = megabits.isdecimal() and (folder / "device").exists()
    return int(megabits) * 1e6 / 8 if is_known else 0.0


def rdma_adapters(classes: Path = Path("/sys/class")) -> list[str]:
    """Return this host's adapters for InfiniBand, RoCE, Omni-Path, EFA or Slingshot. Local.

    MPI uses them to reach other hosts; sockets do not.

    Example:
        >>> isinstance(rdma_adapters(), list)
        True
    """
    found = (path for name in ("infiniband", "cxi") for path in classes.glob(f"{name}/*"))
    return sorted(path.name for path in found)


def own_addresses(preferred: str | None) -> list[str]:
    """Return the addresses at which other ranks may reach this one, best first.

    These are the addresses of the interfaces in GLOO_SOCKET_IFNAME, else the preferred address,
    else the addresses of all interfaces.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if preferred is not None and not interfaces:
        return [preferred]
    names = interfaces.split(",") if interfaces else [name for _, name in socket.if_nameindex()]
    # The loopback interface reaches only ranks of this host, so it comes last.
    found = map(address_of, sorted(names, key=lambda name: name == "lo"))
    return [address for address in found if address is not None]


def is_this_host(name: str) -> bool:
    """Whether a name or address is this host's, by its name or because an interface has it.

    Example:
        >>> is_this_host("localhost")
        True
    """
    if name in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    return any(route_of(address) is not None for address in addresses_of_host(name))


def _routes(family: socket.AddressFamily) -> Iterator[Route]:
    for name, own, length in _interface_addresses(family):
        network = ipaddress.ip_network(f"{own}/{length}", strict=False)
        yield Route(address=own, interface=name, network=str(network))


def _interface_addresses(family: socket.AddressFamily) -> Iterator[tuple[str, str, str]]:
    """Yield interface, address and netmask (or prefix length) of this host's interfaces."""
    if family == socket.AF_INET6:
        with suppress(OSError):  # IPv6 is switched off
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                digits, _, length, _, _, name = line.split()
                yield name, str(ipaddress.IPv6Address(int(digits, 16))), str(int(length, 16))
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            address = _ask(probe, name, _SIOCGIFADDR)
            if address is not None:
                mask = _ask(probe, name, _SIOCGIFNETMASK) or "255.255.255.255"
                yield name, address, mask


def _ask(probe: socket.socket, interface: str, question: int) -> str | None:
    """Ask the kernel for an IPv4 address or netmask of an interface; None if it has none."""
    request = struct.pack("256s", interface[:15].encode())
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), question, request)[20:24])
    except OSError:
        return None
