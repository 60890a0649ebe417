"""What follows from the facts of hosts, and that this host can be examined at all."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from torchmn.control.codec import decode, encode
from torchmn.doctor.checks import CHECKS
from torchmn.doctor.clocks import clock_findings
from torchmn.doctor.disks import DiskFacts, Folder
from torchmn.doctor.findings import Finding
from torchmn.doctor.gpus import GpuFacts
from torchmn.doctor.limits import LimitFacts
from torchmn.doctor.network import Interface, NetworkFacts
from torchmn.doctor.orders import Request
from torchmn.doctor.processors import (
    BoundRank,
    Core,
    OtherProcess,
    ProcessorCheck,
    ProcessorFacts,
    memory_by_place,
)
from torchmn.doctor.versions import VersionFacts
from torchmn.units import GiB, MiB

THREE = Request(slots={"a": 2, "b": 2, "c": 2}, cwd="/")
PROCESSORS = ProcessorFacts(
    model="x",
    cores=[Core(number=0, speed=100.0, share=1.0), Core(number=1, speed=100.0, share=1.0)],
    copied_bytes_per_s=10e9,
    memory_bytes=64 * GiB,
    available_bytes=60 * GiB,
)
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
FOLDER = Folder(
    path="/data",
    free_bytes=90 * GiB,
    total_bytes=100 * GiB,
    write_bytes_per_s=500e6,
    read_bytes_per_s=900e6,
)
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
                name="eth0",
                address=addresses[host],
                network="10.0.0.0/24",
                mtu=mtu,
                is_up=True,
            )
        ],
        taken={},
    )


def cores(speed: float, share: float, other_speed: float, other_share: float) -> list[Core]:
    return [
        Core(number=0, speed=speed, share=share),
        Core(number=1, speed=other_speed, share=other_share),
    ]


def replaced(facts: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(facts, **changes)


HEALTHY: dict[str, dict[str, Any]] = {
    "processors": dict.fromkeys("abc", PROCESSORS),
    "limits": dict.fromkeys("abc", LIMITS),
    "gpus": dict.fromkeys("abc", GPUS),
    "versions": dict.fromkeys("abc", VERSIONS),
    "disks": dict.fromkeys("abc", DISKS),
    "network": {host: network(host) for host in "abc"},
}
FAULTS = {
    "a busy core": (
        "processors",
        replaced(
            PROCESSORS,
            cores=cores(100.0, 1.0, 50.0, 0.5),
            others=[OtherProcess(pid=7, name="hog", cores_used=1.0, last_core=1)],
        ),
        "core 1 of b is shared: our thread gets 50% of it: hog (process 7) uses 1 core",
    ),
    "a slow core": (
        "processors",
        replaced(PROCESSORS, cores=cores(50.0, 1.0, 50.0, 1.0)),
        "a core of b (x) runs at 50% of the speed",
    ),
    "slow memory": (
        "processors",
        replaced(PROCESSORS, copied_bytes_per_s=4e9),
        "b copies 4 GB/s in memory, the other hosts 10",
    ),
    "a quota": (
        "processors",
        replaced(PROCESSORS, quota=0.5, throttled_s=0.4, cores=cores(20.0, 0.2, 20.0, 0.2)),
        "a control group gives b 0.5 of 2 cores",
    ),
    "a memory limit": (
        "processors",
        replaced(PROCESSORS, limit_bytes=4 * GiB),
        "a control group gives b 4 of 64 GiB of memory",
    ),
    "little memory": (
        "processors",
        replaced(PROCESSORS, available_bytes=2 * GiB),
        "2 of 64 GiB of memory are available on b",
    ),
    "fewer cores than slots": (
        "processors",
        replaced(PROCESSORS, cores=PROCESSORS.cores[:1]),
        "b has 2 slots, and may use only 1 core",
    ),
    "two ranks on one core": (
        "processors",
        replaced(
            PROCESSORS,
            ranks=[
                BoundRank(pid=5, rank=0, cores=[1]),
                BoundRank(pid=6, rank=0, cores=[1]),
                BoundRank(pid=8, rank=1, cores=[1]),
            ],
        ),
        "ranks 0 (process 6) and 1 (process 8) are bound to the same core 1 of b",
    ),
    "memory of the other socket": (
        "processors",
        replaced(
            PROCESSORS,
            ranks=[
                BoundRank(pid=5, rank=0, cores=[0], memory_bytes=GiB, remote_bytes=GiB // 4),
                BoundRank(pid=6, rank=1, cores=[1], memory_bytes=GiB, remote_bytes=GiB // 2),
            ],
        ),
        "50% of the memory of rank 1 (process 6) on b belongs to another socket than its cores (1)",
    ),
    "small /dev/shm": (
        "limits",
        replaced(LIMITS, shm_bytes=64 * MiB, shm_free_bytes=64 * MiB),
        "in /dev/shm of b 64 of 64 MiB are free",
    ),
    "few open files": (
        "limits",
        replaced(LIMITS, open_files=256),
        "a process on b may open 256 files",
    ),
    "little locked memory": (
        "limits",
        replaced(LIMITS, has_infiniband=True, locked_bytes=64 * 1024),
        "a process on b may lock 0.0625 MiB",
    ),
    "uncorrected errors": (
        "gpus",
        GpuFacts(num_devices=1, gpus=[{**GPU, "uncorrected": "3"}]),
        "GPU 0 of b has 3 uncorrected memory errors",
    ),
    "a hot GPU": (
        "gpus",
        GpuFacts(num_devices=1, gpus=[{**GPU, "hw_slowdown": "Active", "temperature": "91"}]),
        "GPU 0 of b is throttled (hw_slowdown) at 91 degrees",
    ),
    "few lanes": (
        "gpus",
        GpuFacts(num_devices=1, gpus=[{**GPU, "width": "4"}]),
        "GPU 0 of b uses 4 of 16 PCIe lanes",
    ),
    "a used GPU": (
        "gpus",
        GpuFacts(num_devices=1, gpus=[{**GPU, "used_mib": "40000"}]),
        "40000 of 81559 MiB of GPU 0 of b are in use",
    ),
    "no GPU": ("gpus", GpuFacts(num_devices=0), "b has 0 GPUs, other hosts have 1"),
    "another GPU": (
        "gpus",
        GpuFacts(num_devices=1, gpus=[{**GPU, "name": "V100"}]),
        "b has V100, other hosts have H100",
    ),
    "a silent driver": (
        "gpus",
        GpuFacts(num_devices=1, error="Unable to determine the device handle"),
        "the GPU driver of b does not answer: Unable to determine",
    ),
    "no peer access": (
        "gpus",
        GpuFacts(num_devices=1, gpus=[GPU], without_peer_access=[["GPU0", "GPU1"]]),
        "GPUs GPU0 and GPU1 of b have no peer access",
    ),
    "another torch": (
        "versions",
        VersionFacts(versions={"torch": "2.8", "numpy": "2.0"}),
        "torch is 2.8 on b and 2.9 on other hosts",
    ),
    "no folder": (
        "versions",
        replaced(VERSIONS, problem="there is no folder /x"),
        "on b there is no folder /x",
    ),
    "a slow disk": (
        "disks",
        DiskFacts(folders=[replaced(FOLDER, write_bytes_per_s=50e6)]),
        "b writes 50 MB/s to /data, the other hosts 500",
    ),
    "a disk that reads slowly": (
        "disks",
        DiskFacts(folders=[replaced(FOLDER, read_bytes_per_s=60e6)]),
        "b reads 60 MB/s from /data, the other hosts 900",
    ),
    "a full disk": (
        "disks",
        DiskFacts(folders=[replaced(FOLDER, free_bytes=50 * MiB)]),
        "/data on b has room for 0.0488 GiB",
    ),
    "no permission": (
        "disks",
        DiskFacts(folders=[Folder(path="/data", error="Permission denied")]),
        "b cannot write to /data: Permission denied",
    ),
    "its name on loopback": (
        "network",
        network("b", own="127.0.1.1"),
        "b takes its own name, b, for 127.0.1.1",
    ),
    "an unknown own name": ("network", network("b", own=""), "b does not know the address of its"),
    "an unknown name": ("network", network("b", c=""), "b does not know the name c"),
    "a wrong name": (
        "network",
        network("b", c="10.0.0.9"),
        "b takes c for 10.0.0.9, which is no address of c (10.0.0.3)",
    ),
    "another MTU": ("network", network("b", mtu=9000), "the MTU of eth0 is 9000 on b and 1500"),
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


@pytest.mark.parametrize(("machine_of_c", "is_slow"), [("two", True), ("one", False)])
def test_containers_of_one_machine_have_the_clock_of_the_fastest(
    machine_of_c: str, is_slow: bool
) -> None:
    """The same cores run them all: a container that was measured slower was disturbed."""
    of_one = replaced(PROCESSORS, machine="one")
    slow = replaced(PROCESSORS, cores=cores(50.0, 1.0, 50.0, 1.0), machine=machine_of_c)
    found = {"a": of_one, "b": of_one, "c": slow}
    assert [each.hosts for each in ProcessorCheck().findings(found, THREE)] == [["c"]] * is_slow


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_host_is_named_with_its_place(name: str) -> None:
    check, facts, seen = FAULTS[name]
    (finding,) = alarms(check, {**HEALTHY[check], "b": facts})
    assert finding.hosts == ["b"]
    assert seen in finding.seen
    assert finding.rule.endswith(".")
    assert finding.cure


def test_cores_that_no_process_of_this_host_uses() -> None:
    """The cure names no process, since the message names none."""
    facts = replaced(PROCESSORS, cores=cores(24.0, 0.24, 50.0, 0.5))
    (finding,) = alarms("processors", {**HEALTHY["processors"], "b": facts})
    assert finding.seen == "cores 0, 1 of b are shared: our thread gets 24% of one of them"
    assert "steal time" in finding.cure
    assert "that process" not in finding.cure


@pytest.mark.parametrize("check", [name for name in CHECKS if name != "data_loading"])
def test_this_host_can_be_examined(check: str, tmp_path: Path) -> None:
    host = socket.gethostname()
    request = Request(slots={host: 1}, cwd=str(tmp_path), paths=[str(tmp_path)])
    facts = CHECKS[check].examine(request, host)
    assert decode(encode(facts), CHECKS[check].facts) == facts
    assert list(tmp_path.iterdir()) == []
    list(CHECKS[check].findings({host: facts}, request))


@pytest.mark.parametrize("check", ["processors", "disks"])
def test_the_best_of_two_measurements_counts(check: str) -> None:
    slow = FAULTS["a busy core" if check == "processors" else "a slow disk"][1]
    good = HEALTHY[check]["a"]
    for one, two in ((slow, good), (good, slow)):
        assert alarms(check, {**HEALTHY[check], "b": CHECKS[check].best_of(one, two)}) == []


def test_memory_is_counted_by_node(tmp_path: Path) -> None:
    for node, cores in ((0, "0-1"), (1, "2-3")):
        folder = tmp_path / "sys/devices/system/node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    text = (
        "7f00 default file=/lib/x.so mapped=5 N0=3 N1=2 kernelpagesize_kB=4\n"
        "7f10 default anon=10 dirty=10 N1=10 kernelpagesize_kB=2048\n"
        "7f20 default stack\n"
    )
    whole = 5 * 4096 + 10 * 2 * MiB
    assert memory_by_place(text, [0], tmp_path) == (whole, 2 * 4096 + 10 * 2 * MiB)
    assert memory_by_place(text, [1, 2], tmp_path) == (whole, 0)
    assert memory_by_place(text, [0], tmp_path / "no nodes") == (whole, 0)
