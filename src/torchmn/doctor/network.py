"""Check names, interfaces and clocks of hosts."""

import ipaddress
import os
import socket
import statistics
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

from torchmn.cluster.gpus import text_of
from torchmn.cluster.network import addresses_of_host, nominal_speed, own_routes, route_of, route_to
from torchmn.control.codec import Record
from torchmn.doctor.findings import Finding, Request, deviating, listed

_MAX_RESOLVED = 16
_SYS = Path("/sys/class/net")


class Interface(Record, frozen=True, kw_only=True):
    """A network interface and one of its addresses.

    ``bytes_per_s`` is the nominal speed, 0 if the adapter reports none or is virtual, whose speed
    means nothing.
    """

    name: str
    address: str
    network: str
    mtu: int
    is_up: bool
    bytes_per_s: float = 0.0


class NetworkFacts(Record, frozen=True, kw_only=True):
    """``resolved`` has the addresses, ``routes`` the interface, to each host by name.

    ``taken`` has the interface that each library chooses in a job not started by `torchmn run`.
    """

    hostname: str
    own_addresses: list[str]
    resolved: dict[str, list[str]]
    routes: dict[str, str]
    interfaces: list[Interface]
    taken: dict[str, str]


def examine(request: Request, host: str) -> NetworkFacts:
    """Read names and interfaces. Sends nothing except queries for names."""
    hostname, interfaces = socket.gethostname(), list(_interfaces())
    others = _others(request.hosts, host)
    routes = {name: route.interface for name in others if (route := route_to(name))}
    return NetworkFacts(
        hostname=hostname,
        own_addresses=addresses_of_host(hostname),
        resolved={name: addresses_of_host(name) for name in others},
        routes=routes,
        interfaces=interfaces,
        taken=_taken(hostname, interfaces, os.environ),
    )


def findings(found: Mapping[str, NetworkFacts], request: Request) -> Iterator[Finding]:
    """Find problems of names, then of interfaces: wrong names explain much of the latter."""
    if len(request.hosts) > 1:
        for host, facts in found.items():
            yield from _own_name(host, facts)
        yield from _names_of_others(found)
        yield from _mtu(found)


_NAME_RULE = "A host's name resolves on the host itself to the address that others use."


def _own_name(host: str, facts: NetworkFacts) -> Iterator[Finding]:
    addresses = facts.own_addresses
    if not addresses:
        yield Finding(
            severity="warning",
            hosts=[host],
            seen=f"{host} does not know the address of its own name, {facts.hostname}",
            rule=_NAME_RULE,
            cure=f"Add a line 'ADDRESS {facts.hostname}' to /etc/hosts on {host}, or to the DNS.",
        )
    elif all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses):
        yield Finding(
            severity="error",
            hosts=[host],
            seen=f"{host} takes its own name, {facts.hostname}, for {addresses[0]}, which only "
            "leads to itself: gloo and torchrun would give that address to other hosts",
            rule=_NAME_RULE,
            cure=f"In /etc/hosts on {host} remove {facts.hostname} from the line of {addresses[0]} "
            "and add it to a line with its network address.",
        )


def _names_of_others(found: Mapping[str, NetworkFacts]) -> Iterator[Finding]:
    for host, facts in found.items():
        unknown = [name for name, addresses in facts.resolved.items() if not addresses]
        if unknown:
            yield Finding(
                severity="error",
                hosts=[host],
                seen=f"{host} does not know the name {listed(unknown)}",
                rule="Every host resolves the names of all hosts.",
                cure=f"Add them to the DNS or to /etc/hosts on {host}.",
            )
        for name, addresses in facts.resolved.items():
            if not addresses or name not in found:
                continue
            real = {interface.address for interface in found[name].interfaces}
            if real and not real & set(addresses):
                yield Finding(
                    severity="error",
                    hosts=[host],
                    seen=f"{host} takes {name} for {addresses[0]}, which is no address of {name} "
                    f"({listed(sorted(real))})",
                    rule="The name of a host means the same host everywhere.",
                    cure=f"Correct the line of {name} in /etc/hosts on {host}, or the DNS.",
                )


def _mtu(found: Mapping[str, NetworkFacts]) -> Iterator[Finding]:
    networks: dict[str, dict[str, Interface]] = {}
    for host, facts in found.items():
        for interface in facts.interfaces:
            networks.setdefault(interface.network, {})[host] = interface
    for network, interfaces in networks.items():
        usual, others = deviating({host: str(each.mtu) for host, each in interfaces.items()})
        for mtu, hosts in others.items():
            name = interfaces[hosts[0]].name
            yield Finding(
                severity="warning",
                hosts=hosts,
                seen=f"the MTU of {name} is {mtu} on {listed(hosts)} and {usual} on other hosts of "
                f"{network}",
                rule="All interfaces of one network have the same MTU, or long packets are lost.",
                cure=f"ip link set {name} mtu {usual}",
            )


def _others(hosts: list[str], host: str) -> list[str]:
    """Return the names to resolve: all of few hosts, else the first two and the next ones."""
    place = hosts.index(host) if host in hosts else 0
    following = [*hosts[place + 1 :], *hosts[:place]]
    chosen = dict.fromkeys(chain(hosts[:2], following))
    chosen.pop(host, None)
    return list(chosen)[:_MAX_RESOLVED]


def _interfaces() -> Iterator[Interface]:
    for route in own_routes():
        if not route.is_loopback:
            folder = _SYS / route.interface
            yield Interface(
                name=route.interface,
                address=route.address,
                network=route.network,
                mtu=_number(folder / "mtu"),
                is_up=text_of(folder / "operstate") not in ("down", "lowerlayerdown"),
                bytes_per_s=nominal_speed(route.interface),
            )


def _taken(hostname: str, interfaces: list[Interface], env: Mapping[str, str]) -> dict[str, str]:
    """Return the interface that each library chooses by itself.

    gloo takes the interface of the host's own name; NCCL takes InfiniBand, else one that is not
    docker's, else any. Open MPI uses all interfaces at once.
    """
    names = list(dict.fromkeys(each.name for each in interfaces if each.is_up))
    own = next(iter(addresses_of_host(hostname)), None)
    route = route_of(own) if own else None
    nccl = sorted(names, key=lambda name: (not name.startswith("ib"), name.startswith("docker")))
    return {
        "gloo": env.get("GLOO_SOCKET_IFNAME") or (route.interface if route else "lo"),
        "NCCL": env.get("NCCL_SOCKET_IFNAME") or next(iter(nccl), "lo"),
        "Open MPI": env.get("OMPI_MCA_btl_tcp_if_include") or ", ".join(names),
    }


def _number(path: Path) -> int:
    text = text_of(path)
    return int(text) if text.lstrip("-").isdecimal() else 0


_MAX_OFFSET_S = 0.5


def clock_findings(offsets: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    """Find wrong clocks. ``offsets``: seconds ahead of the launcher's clock, and their error.

    The median counts as right; of two hosts the one whose clock agrees with the launcher's.
    """
    usual = statistics.median(found for found, _ in offsets.values()) if len(offsets) > 2 else 0.0
    for host, (offset_s, error_s) in offsets.items():
        off_s = offset_s - usual
        way = "ahead of" if off_s > 0 else "behind"
        if abs(off_s) > _MAX_OFFSET_S + error_s:
            yield Finding(
                severity="warning",
                hosts=[host],
                seen=f"the clock of {host} is {abs(off_s):.3g} s {way} those of other hosts "
                f"(within {error_s * 1e3:.2g} ms)",
                rule=f"Clocks differ by at most {_MAX_OFFSET_S:g} s, or logs, files and time "
                "limits of several hosts contradict each other.",
                cure="Start chrony or ntpd on it (chronyc tracking, timedatectl).",
            )
