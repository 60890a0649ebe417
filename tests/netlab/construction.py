"""The parts of a lab: a switch, hosts, and the links between them."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.netlab.cleanup import OPEN
from tests.netlab.enter_script import enter_script, host_case
from tests.netlab.namespaces import call, entering, make_namespaces, pinned, tool
from tests.netlab.shaping import tc_batch

INTERFACE = "eth0"
"""The name of every host's interface."""
NETWORK = "10.78.0"
"""Hosts are 10.78.0.1, 10.78.0.2, ... in every lab: no two labs share a switch."""
MAX_HOSTS = 250

# IPv6 on lo only: neighbour and router discovery would be counted as bytes of the job.
_NO_IPV6 = """
switch=/proc/sys/net/ipv6/conf/default/disable_ipv6
if [ -e $switch ]; then echo 1 > $switch; fi
"""
_SWITCH = f"""{_NO_IPV6}
ip link add name bridge type bridge mcast_snooping 0
ip link set dev bridge up
"""
# A sysfs shows the devices of the network namespace in which it was mounted, so each host needs its
# own. The control groups, which are mounted in the machine's, are bound into it.
_HOST = f"""{_NO_IPV6}
name=$1 folder=$2
echo "$name" > /proc/sys/kernel/hostname
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs /dev/shm
if [ -d /sys/fs/cgroup ]; then
  mount --rbind /sys/fs/cgroup "$folder/cgroup"
  mount -t sysfs sysfs /sys
  mount --rbind "$folder/cgroup" /sys/fs/cgroup
  umount -l "$folder/cgroup"
else
  mount -t sysfs sysfs /sys
fi
ip link set dev lo up
"""


@dataclass(frozen=True, kw_only=True)
class HostParts:
    """A host's name, address, namespaces (kind to path) and the cores its processes get.

    ``is_open`` is a file that exists while processes may enter.
    """

    name: str
    address: str
    namespaces: Mapping[str, str]
    cores: Collection[int] | None
    is_open: Path


@dataclass(frozen=True, kw_only=True)
class LabParts:
    """The supervisor's report to the owner."""

    folder: Path
    switch: Mapping[str, str]
    hosts: tuple[HostParts, ...]


def port_of(index: int) -> str:
    """The switch's end of a host's link."""
    return f"port{index}"


def build(
    folder: Path, *, num_hosts: int, rate: str | None, cores: list[list[int] | None]
) -> LabParts:
    """Create a lab whose namespaces live as long as this process.

    Raises LaunchError: the system does not allow it.
    """
    names = [f"n{i}" for i in range(num_hosts)]
    addresses = [f"{NETWORK}.{i + 1}" for i in range(num_hosts)]
    _write_hosts_file(folder / "hosts", dict(zip(addresses, names, strict=True)))
    (folder / "cgroup").mkdir()
    (folder / OPEN).touch()

    switch = make_namespaces(["net"], _SWITCH)
    hosts = []
    for index, (name, address) in enumerate(zip(names, addresses, strict=True)):
        entry_options = make_namespaces(["net", "uts", "mount"], _HOST, name, str(folder))
        _plug_in(switch, entry_options, port_of(index), address)
        shape(entry_options, [INTERFACE], rate)
        hosts.append(
            HostParts(
                name=name,
                address=address,
                namespaces=entry_options,
                cores=cores[index],
                is_open=folder / OPEN,
            )
        )
    shape(switch, [port_of(index) for index in range(num_hosts)], rate)

    script = folder / "enter"
    script.write_text(enter_script([_host_case(host) for host in hosts], is_open=folder / OPEN))
    script.chmod(0o755)
    return LabParts(folder=folder, switch=switch, hosts=tuple(hosts))


def shape(namespaces: Mapping[str, str], devices: Collection[str], rate: str | None) -> None:
    """Limit the rate at which these devices send, or with None remove the limit."""
    text = tc_batch(devices, rate)
    call([*entering({"net": namespaces["net"]}), tool("tc"), "-batch", "-"], text=text)


def _write_hosts_file(path: Path, names: Mapping[str, str]) -> None:
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{address} {name}" for address, name in names.items()]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o644)


def _plug_in(switch: Mapping[str, str], host: Mapping[str, str], port: str, address: str) -> None:
    at_switch = (
        f"link add name {port} type veth peer name {INTERFACE} netns {host['net']}\n"
        f"link set dev {port} master bridge up\n"
    )
    at_host = f"addr add {address}/24 dev {INTERFACE}\nlink set dev {INTERFACE} up\n"
    call([*entering(switch), tool("ip"), "-batch", "-"], text=at_switch)
    call([*entering({"net": host["net"]}), tool("ip"), "-batch", "-"], text=at_host)


def _host_case(host: HostParts) -> str:
    cores = host.cores or os.sched_getaffinity(0)
    return host_case(
        name=host.name,
        address=host.address,
        entry_options=entering(host.namespaces)[1:-1],
        cores=pinned(cores)[-1],
    )
