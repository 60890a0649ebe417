"""Faults that are planted on test hosts, and by which finding the doctor is to name them.

A fault marked with ``stand_in`` is not the real thing: the text says what stands for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from doctor.testbed import Testbed
from torchmn.testing.netlab import Host
from torchmn.testing.netlab.construction import INTERFACE, port_of, shape
from torchmn.testing.netlab.namespaces import call, entering, tool

BASE_RATES = ("200mbit", "500mbit", "1gbit")
NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *--query-gpu=*) {rows} ;;
  *) : ;;
esac
"""
GPU_ROW = "0, Stand-in, 81559, 4, 0, [N/A], Not Active, Not Active, 40, 16, 16"


@dataclass(frozen=True)
class Fault:
    """``plant`` returns the hosts of which one is to be named, in a finding of ``check`` whose text
    holds one of ``words``."""

    kind: str
    check: str
    words: tuple[str, ...]
    plant: Callable[[Testbed, Host, random.Random], set[str]]
    num_hosts: tuple[int, ...] = (2, 3, 4)
    stand_in: str = ""
    has_own_cores: bool = False

    def is_named(self, found: dict[str, Any], places: set[str]) -> bool:
        """Whether the doctor names kind and place, and no other host with it."""
        return any(
            finding["check"] == self.check
            and finding["severity"] != "note"
            and any(word in finding["seen"] for word in self.words)
            and set(finding["hosts"]) <= places
            for finding in found["findings"]
        )


FAULTS: list[Fault] = []


def fault(
    check: str,
    *words: str,
    num_hosts: tuple[int, ...] = (2, 3, 4),
    stand_in: str = "",
    has_own_cores: bool = False,
) -> Callable[[Callable[[Testbed, Host, random.Random], set[str] | None]], Any]:
    """Register a function that plants; its name is the kind. It returns the places, if not HOST."""

    def register(function: Callable[[Testbed, Host, random.Random], set[str] | None]) -> Any:
        def plant(bed: Testbed, host: Host, chance: random.Random) -> set[str]:
            return function(bed, host, chance) or {host.name}

        kind = function.__name__.replace("_", " ")
        FAULTS.append(Fault(kind, check, words, plant, num_hosts, stand_in, has_own_cores))
        return function

    return register


def _fraction(bed: Testbed, chance: random.Random) -> str:
    """The rate of the links divided by 4 to 25."""
    rate = bed.lab.rates[0] or "1gbit"
    megabits = float(rate[:-4]) * (1000 if rate.endswith("gbit") else 1)
    return f"{megabits / chance.uniform(4, 25):.3f}mbit"


def _pair(bed: Testbed, host: Host) -> set[str] | None:
    """The link of two hosts does not show which of them has the fault."""
    return {each.name for each in bed.hosts} if len(bed.hosts) == 2 else None


# ---- links --------------------------------------------------------------------------------------


@fault("links", "sends to")
def slow_sending(bed: Testbed, host: Host, chance: random.Random) -> set[str] | None:
    shape(host.namespaces, [INTERFACE], _fraction(bed, chance))
    return _pair(bed, host)


@fault("links", "receives from", "sends to")
def slow_receiving(bed: Testbed, host: Host, chance: random.Random) -> set[str] | None:
    shape(bed.lab._switch, [port_of(host.index)], _fraction(bed, chance))
    return _pair(bed, host)


@fault("links", "carries", num_hosts=(3, 4))
def slow_link_in_both_directions(bed: Testbed, host: Host, chance: random.Random) -> None:
    bed.lab.set_rate(_fraction(bed, chance), hosts=[host])


@fault("links", " of ", num_hosts=(2, 3, 4))
def all_links_below_their_speed(bed: Testbed, host: Host, chance: random.Random) -> set[str] | None:
    bed.options += ["--expect", bed.lab.rates[0] or "1gbit"]
    bed.lab.set_rate(_fraction(bed, chance))
    return {each.name for each in bed.hosts}


@fault("links", "sends to", "sent again")
def lossy_shaping(bed: Testbed, host: Host, chance: random.Random) -> set[str] | None:
    """A policer: a token bucket with hardly a queue, which drops what exceeds it."""
    rate = _fraction(bed, random.Random(1))
    words = f"qdisc replace dev {INTERFACE} root tbf rate {rate} burst 16kb limit 3200\n"
    call([*entering({"net": host.namespaces["net"]}), tool("tc"), "-batch", "-"], text=words)
    return _pair(bed, host)


@fault("links", "is idle", num_hosts=(2,))
def names_on_the_slow_interface(bed: Testbed, host: Host, chance: random.Random) -> set[str] | None:
    bed.lab.set_rate(_fraction(bed, chance))
    one, two = bed.hosts
    one.run(["ip", "link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns",
             two.namespaces["net"]])  # fmt: skip
    for each in bed.hosts:
        each.run(["ip", "address", "add", f"10.90.0.{each.index + 1}/24", "dev", "eth1"])
        each.run(["ip", "link", "set", "eth1", "up"])
    return {each.name for each in bed.hosts}


@fault("links", "no connection", num_hosts=(3, 4))
def closed_ports(bed: Testbed, host: Host, chance: random.Random) -> None:
    """A firewall: what comes in for ports above 1024 is dropped, or refused on the way out."""
    rule = ["ipproto", "tcp", "dport", "1024-65534"]
    host.run(["ip", "rule", "add", "pref", "10", "lookup", "local"])
    host.run(["ip", "rule", "del", "pref", "0"])
    action = chance.choice(["blackhole", "prohibit"])
    host.run(["ip", "rule", "add", "pref", "5", "iif", "eth0", *rule, action])


@fault("links", "no connection", num_hosts=(3, 4))
def a_link_that_is_down(bed: Testbed, host: Host, chance: random.Random) -> None:
    bed.lab.cut_link(host)


# ---- names --------------------------------------------------------------------------------------


def _set_hosts(bed: Testbed, host: Host, change: Callable[[str], str]) -> None:
    path = bed.folder / f"hosts-{host.name}"
    lines = (bed.lab.folder / "hosts").read_text().splitlines()
    path.write_text("".join(f"{change(line)}\n" for line in lines))
    host.run(["mount", "--bind", path, "/etc/hosts"])


@fault("network", "only leads to itself")
def host_name_on_loopback(bed: Testbed, host: Host, chance: random.Random) -> None:
    own = f"{host.address} {host.name}"
    _set_hosts(bed, host, lambda line: f"127.0.1.1 {host.name}" if line == own else line)


@fault("network", "which is no address of")
def wrong_address_of_another_host(bed: Testbed, host: Host, chance: random.Random) -> None:
    other = chance.choice([each for each in bed.hosts if each is not host])
    right = f"{other.address} {other.name}"
    _set_hosts(bed, host, lambda line: f"10.78.0.200 {other.name}" if line == right else line)


@fault("network", "does not know the name")
def unknown_name_of_another_host(bed: Testbed, host: Host, chance: random.Random) -> None:
    other = chance.choice([each for each in bed.hosts if each is not host])
    right = f"{other.address} {other.name}"
    _set_hosts(bed, host, lambda line: "" if line == right else line)


@fault("network", "MTU", num_hosts=(3, 4))
def another_mtu(bed: Testbed, host: Host, chance: random.Random) -> None:
    host.run(["ip", "link", "set", "eth0", "mtu", str(chance.choice([1400, 1280]))])


@fault("hosts", "does not answer")
def a_host_without_a_shell(bed: Testbed, host: Host, chance: random.Random) -> None:
    line = chance.choice(["echo 'Connection refused' >&2; exit 255", "exec sleep 600"])
    bed.in_shell(host, line)


# ---- cores and memory ---------------------------------------------------------------------------


@fault("processors", "a control group gives")
def a_limit_of_cores(bed: Testbed, host: Host, chance: random.Random) -> None:
    share = chance.uniform(0.2, 0.6)
    bed.control_group(host, "cpu", cpu__cfs_quota_us=str(round(100_000 * share)))


@fault("processors", "GiB of memory")
def a_limit_of_memory(bed: Testbed, host: Host, chance: random.Random) -> None:
    limit = chance.randrange(600, 1800) << 20
    bed.control_group(host, "memory", memory__limit_in_bytes=str(limit))


@fault("processors", "bound to the same core", num_hosts=(3, 4))
def two_ranks_on_one_core(bed: Testbed, host: Host, chance: random.Random) -> None:
    """Idle processes with the variables of ranks, bound as a wrong launcher would."""
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        bed.background(host, ["taskset", "-c", "0", "sleep", "600"], **place)


@fault("processors", "slots, and only", num_hosts=(2,), has_own_cores=True)
def fewer_cores_than_slots(bed: Testbed, host: Host, chance: random.Random) -> set[str] | None:
    bed.slots = chance.choice([2, 4])
    return {each.name for each in bed.hosts}


# ---- limits, disks and data ---------------------------------------------------------------------


@fault("limits", "/dev/shm")
def small_shared_memory(bed: Testbed, host: Host, chance: random.Random) -> None:
    size = chance.choice([16, 64, 128])
    host.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", "/dev/shm"])


@fault("limits", "open")
def few_open_files(bed: Testbed, host: Host, chance: random.Random) -> None:
    bed.in_shell(host, f"ulimit -n {chance.choice([128, 256, 512])}")


@fault("disks", "has room for")
def a_full_disk(bed: Testbed, host: Host, chance: random.Random) -> None:
    host.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", bed.data])


@fault("disks", "cannot write")
def a_file_system_that_is_read_only(bed: Testbed, host: Host, chance: random.Random) -> None:
    host.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", bed.data])


# ---- versions and clocks ------------------------------------------------------------------------


@fault("versions", "torch is", stand_in="the metadata of a package torch 2.0.1, and no package")
def another_version_of_torch(bed: Testbed, host: Host, chance: random.Random) -> None:
    folder = bed.shim(host) / "torch-2.0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.1\n")


@fault("clocks", "the clock of", stand_in="time.time is shifted in that Python")
def a_clock_that_is_off(bed: Testbed, host: Host, chance: random.Random) -> None:
    offset_s = chance.choice([-1, 1]) * chance.uniform(1, 5)
    (bed.shim(host) / "sitecustomize.py").write_text(
        f"import time\nreal = time.time\ntime.time = lambda: real() + {offset_s}\n"
    )


# ---- GPUs ---------------------------------------------------------------------------------------


def _gpus(bed: Testbed, host: Host, old: str, new: str, num_good: int = 2) -> None:
    """Stand-in drivers with two GPUs on all hosts; on one of them a row differs."""
    for each in bed.hosts:
        rows = [GPU_ROW, GPU_ROW.replace("0, ", "1, ", 1)]
        if each is host:
            rows = [row.replace(old, new) for row in rows][:num_good]
        text = "; ".join(f"echo '{row}'" for row in rows)
        path = bed.shim(each) / "bin" / "nvidia-smi"
        path.write_text(NVIDIA_SMI.format(rows=text))
        path.chmod(0o755)


def _gpu_fault(kind: str, word: str, old: str, new: str, num_good: int = 2) -> None:
    def plant(bed: Testbed, host: Host, chance: random.Random) -> None:
        _gpus(bed, host, old, new, num_good)

    plant.__name__ = kind
    fault("gpus", word, num_hosts=(3, 4), stand_in="an nvidia-smi that prints a table")(plant)


_gpu_fault("memory errors of a GPU", "uncorrected", "4, 0, [N/A]", "4, 7, [N/A]")
_gpu_fault("a throttled GPU", "is throttled", "Not Active, Not Active, 40", "Active, Active, 92")
_gpu_fault("a GPU that is missing", "has 1 GPUs", "", "", 1)
_gpu_fault("a GPU with few lanes", "PCIe lanes", "16, 16", "4, 16")


def draw(seed: int, number: int) -> tuple[Fault, random.Random]:
    """The fault of a trial: all kinds in turn."""
    return FAULTS[number % len(FAULTS)], random.Random(f"{seed}:{number}")
