"""Own addresses and interfaces, on the loopback interface that every host has."""

import socket
from pathlib import Path

import pytest

from torchmn.cluster.network import is_this_host, rdma_adapters, route_of, route_to


def test_the_way_to_oneself() -> None:
    route = route_to("127.0.0.1")
    assert route is not None
    assert (route.address, route.interface, route.network) == ("127.0.0.1", "lo", "127.0.0.0/8")
    assert route.is_loopback


def test_names_that_do_not_resolve() -> None:
    assert route_to("no-such-host.invalid") is None
    assert not is_this_host("no-such-host.invalid")


def test_addresses_of_no_local_interface() -> None:
    assert route_of("192.0.2.1") is None  # kept for documentation
    assert not is_this_host("192.0.2.1")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_this_host(name: str) -> None:
    assert is_this_host(name)


def test_adapters_of_networks_other_than_ethernet(tmp_path: Path) -> None:
    assert rdma_adapters(tmp_path) == []
    for name in ("infiniband/mlx5_1", "infiniband/mlx5_0", "cxi/cxi0", "net/eth0"):
        (tmp_path / name).mkdir(parents=True)
    assert rdma_adapters(tmp_path) == ["cxi0", "mlx5_0", "mlx5_1"]
