"""Which addresses and interfaces a job uses where hosts have several networks, or IPv6 alone."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.all.processes.test_hosts import need_mpirun, torchmn_run
from tests.marks import ON_TEST_HOSTS
from tests.netlab import Host, Lab, netlab

pytestmark = [*ON_TEST_HOSTS, pytest.mark.timeout(180)]

WAY = """
import json, os, sys, torch, torchmn
comm = torchmn.create_communicator("naive")
total = float(comm.allreduce(torch.ones(1 << 20)).sum())
names = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "OMPI_MCA_btl_tcp_if_include")
with open(f"{sys.argv[1]}/{comm.rank}.json", "w") as file:
    json.dump([total / (1 << 20), *(os.environ.get(name, "") for name in names)], file)
assert "tcp" in comm.settings["transport"], comm.settings
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with netlab(3, None) as made:
        yield made


def set_names(host: Host, folder: Path, **names: str) -> None:
    """Let a host resolve these names, and no others."""
    path = folder / f"names-of-{host.name}"
    path.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
    host.run(["mount", "--bind", path, "/etc/hosts"])


def ways(lab: Lab, folder: Path, *options: str) -> list[list[object]]:
    """What ranks on n1 and n2 found, started from n0."""
    (folder / "way.py").write_text(WAY)
    done = torchmn_run(lab, "--hosts", "n1:1,n2:1", *options, "way.py", folder, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture
def work_network(lab: Lab, tmp_path: Path) -> None:
    """n0 is a login host. n1 and n2 reach each other by a network of their own, and no other way.

    Its interfaces have different names, and names of hosts mean addresses in it, except on n0.
    """
    _, one, two = lab.hosts
    link = ["ip", "link", "add", "fast", "type", "veth", "peer", "name", "quick"]
    one.run([*link, "netns", two.namespaces["net"]])
    for host, other, interface, address in ((one, two, "fast", 1), (two, one, "quick", 2)):
        host.run(["ip", "address", "add", f"10.90.0.{address}/24", "dev", interface])
        host.run(["ip", "link", "set", interface, "up"])
        host.run(["ip", "route", "add", "unreachable", f"{other.address}/32"])
        set_names(host, tmp_path, n0=lab.hosts[0].address, n1="10.90.0.1", n2="10.90.0.2")


@pytest.mark.parametrize("launcher", ["ssh", "mpirun"])
def test_the_network_between_the_hosts_is_used_not_the_launchers(
    lab: Lab, work_network: None, tmp_path: Path, launcher: str
) -> None:
    options = ["--launcher", launcher, "--backend", "gloo"]
    if launcher == "mpirun":
        need_mpirun()
        options[-1] = "mpi"
    found = ways(lab, tmp_path, *options)
    networks = "10.90.0.0/24" if launcher == "mpirun" else ""
    assert found == [[2.0, interface, "10.90.0.1", networks] for interface in ("fast", "quick")]


def test_hosts_with_ipv6_alone(lab: Lab, tmp_path: Path) -> None:
    names = {host.name: f"fd00::{host.index + 1}" for host in lab.hosts}
    for host in lab.hosts:
        host.run(["sh", "-c", "echo 0 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6"])
        host.run(["ip", "address", "add", f"{names[host.name]}/64", "dev", "eth0", "nodad"])
        host.run(["ip", "-4", "address", "flush", "dev", "eth0"])
        set_names(host, tmp_path, **names)
    found = ways(lab, tmp_path, "--backend", "gloo")
    assert found == [[2.0, "eth0", "fd00::2", ""]] * 2
