"""What follows from the facts of hosts, and that this host can be examined at all."""

import socket
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from torchmn.cluster.units import GiB, MiB
from torchmn.control.codec import decode, encode
from torchmn.doctor.disks import DiskFacts, Folder
from torchmn.doctor.findings import Finding, Request
from torchmn.doctor.gpus import GpuFacts
from torchmn.doctor.host_main import CHECKS
from torchmn.doctor.limits import LimitFacts
from torchmn.doctor.network import Interface, NetworkFacts, clock_findings
from torchmn.doctor.processors import ProcessorFacts
from torchmn.doctor.versions import VersionFacts

THREE = Request(slots={"a": 2, "b": 2, "c": 2}, cwd="/")
PROCESSORS = ProcessorFacts(num_cores=2, memory_bytes=64 * GiB, available_bytes=60 * GiB)
LIMITS = LimitFacts(
    open_files=65536,
    locked_bytes=-1,
    has_infiniband=False,
    shm_bytes=8 * GiB,
    shm_free_bytes=8 * GiB,
)
GPU = {
    "index": "0",
    "name": "H100",
    "memory_mib": "81559",
    "used_mib": "4",
    "uncorrected": "0",
    "pending": "[N/A]",
    "hw_slowdown": "Not Active",
    "sw_thermal": "Not Active",
    "temperature": "40",
    "width": "16",
    "max_width": "16",
}
GPUS = GpuFacts(num_devices=1, gpus=[GPU])
VERSIONS = VersionFacts(versions={"torch": "2.9", "numpy": "2.0"})
FOLDER = Folder(path="/data", free_bytes=90 * GiB, total_bytes=100 * GiB)
DISKS = DiskFacts(folders=[FOLDER])


def network(host: str, *, own: str | None = None, mtu: int = 1500, **wrong: str) -> NetworkFacts:
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
    return NetworkFacts(
        hostname=host,
        own_addresses=[addresses[host] if own is None else own] if own != "" else [],
        resolved={
            name: [found] if (found := wrong.get(name, address)) else []
            for name, address in addresses.items()
            if name != host
        },
        routes={},
        interfaces=[
            Interface(
                name="eth0", address=addresses[host], network="10.0.0.0/24", mtu=mtu, is_up=True
            )
        ],
        taken={},
    )


replaced = msgspec.structs.replace
cores, limits = partial(replaced, PROCESSORS), partial(replaced, LIMITS)


def gpu(**changes: str) -> GpuFacts:
    return GpuFacts(num_devices=1, gpus=[{**GPU, **changes}])


HEALTHY: dict[str, dict[str, Any]] = {
    "processors": dict.fromkeys("abc", PROCESSORS),
    "limits": dict.fromkeys("abc", LIMITS),
    "gpus": dict.fromkeys("abc", GPUS),
    "versions": dict.fromkeys("abc", VERSIONS),
    "disks": dict.fromkeys("abc", DISKS),
    "network": {host: network(host) for host in "abc"},
}
FAULTS = {
    "a quota": (cores(quota=0.5), "gives b 0.5 of 2 cores"),
    "a memory limit": (cores(limit_bytes=4 * GiB), "gives b 4 of 64 GiB of memory"),
    "little memory": (cores(available_bytes=2 * GiB), "2 of 64 GiB of memory are available on b"),
    "fewer cores than slots": (cores(num_cores=1), "b has 2 slots, and may use only 1 core"),
    "small /dev/shm": (
        limits(shm_bytes=64 * MiB, shm_free_bytes=64 * MiB),
        "of b 64 of 64 MiB are free",
    ),
    "few open files": (limits(open_files=256), "on b may open 256 files"),
    "little locked memory": (
        limits(has_infiniband=True, locked_bytes=64 * 1024),
        "on b may lock 0.0625 MiB",
    ),
    "uncorrected errors": (gpu(uncorrected="3"), "GPU 0 of b has 3 uncorrected"),
    "a hot GPU": (
        gpu(hw_slowdown="Active", temperature="91"),
        "GPU 0 of b is throttled (hw_slowdown) at 91",
    ),
    "few lanes": (gpu(width="4"), "GPU 0 of b uses 4 of 16 PCIe lanes"),
    "a used GPU": (gpu(used_mib="40000"), "40000 of 81559 MiB of GPU 0 of b"),
    "no GPU": (GpuFacts(num_devices=0), "b has 0 GPUs, other hosts have 1"),
    "another GPU": (gpu(name="V100"), "b has V100, other hosts have H100"),
    "a silent driver": (GpuFacts(num_devices=1, error="Unable"), "of b does not answer: Unable"),
    "no peer access": (
        GpuFacts(num_devices=1, gpus=[GPU], without_peer_access=[["GPU0", "GPU1"]]),
        "GPU0 and GPU1 of b have no peer access",
    ),
    "another torch": (
        VersionFacts(versions={"torch": "2.8", "numpy": "2.0"}),
        "torch is 2.8 on b and 2.9 on other hosts",
    ),
    "no folder": (
        replaced(VERSIONS, problem="there is no folder /x"),
        "on b there is no folder /x",
    ),
    "a full disk": (
        DiskFacts(folders=[replaced(FOLDER, free_bytes=50 * MiB)]),
        "/data on b has room for 0.0488 GiB",
    ),
    "no permission": (
        DiskFacts(folders=[Folder(path="/data", error="Permission denied")]),
        "b cannot write to /data: Permission denied",
    ),
    "its name on loopback": (
        network("b", own="127.0.1.1"),
        "b takes its own name, b, for 127.0.1.1",
    ),
    "an unknown own name": (network("b", own=""), "b does not know the address of its"),
    "an unknown name": (network("b", c=""), "b does not know the name c"),
    "a wrong name": (network("b", c="10.0.0.9"), "b takes c for 10.0.0.9"),
    "another MTU": (network("b", mtu=9000), "the MTU of eth0 is 9000 on b and 1500"),
}


@pytest.mark.parametrize(
    ("offsets", "off"),
    [
        ({"a": 0.0, "b": 0.2, "c": -0.2}, []),
        ({"a": 0.0, "b": 5.0, "c": 0.1}, ["b"]),
        ({"a": 0.0, "b": -5.0}, ["b"]),
        ({"a": 0.0, "b": 5.0, "c": 5.1, "d": 5.0}, ["a"]),
    ],
)
def test_clocks_that_are_off(offsets: dict[str, float], off: list[str]) -> None:
    found = clock_findings({host: (offset, 0.01) for host, offset in offsets.items()})
    assert [finding.hosts for finding in found] == [[host] for host in off]


def alarms(check: str, found: dict[str, Any]) -> list[Finding]:
    findings = CHECKS[check].findings(found, THREE)
    return [finding for finding in findings if finding.severity != "note"]


@pytest.mark.parametrize("check", HEALTHY)
def test_healthy_hosts(check: str) -> None:
    assert alarms(check, HEALTHY[check]) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_host_is_named_with_its_place(name: str) -> None:
    facts, seen = FAULTS[name]
    check = next(each for each, of in CHECKS.items() if isinstance(facts, of.facts))
    (finding,) = alarms(check, {**HEALTHY[check], "b": facts})
    assert finding.hosts == ["b"]
    assert seen in finding.seen
    assert finding.rule.endswith(".")
    assert finding.cure


@pytest.mark.parametrize("check", CHECKS)
def test_this_host_can_be_examined(check: str, tmp_path: Path) -> None:
    host = socket.gethostname()
    request = Request(slots={host: 1}, cwd=str(tmp_path), paths=[str(tmp_path)])
    facts = CHECKS[check].examine(request, host)
    assert decode(encode(facts), CHECKS[check].facts) == facts
    assert list(tmp_path.iterdir()) == []
    list(CHECKS[check].findings({host: facts}, request))
