"""What follows from measured links: which rule is broken, and where the cause is."""

from collections.abc import Callable
from itertools import combinations

import msgspec
import pytest

from torchmn.doctor.findings import Finding, LinkMeasured, Request
from torchmn.doctor.links import (
    Link,
    better_link,
    link_findings,
    links_between,
    rounds_of,
    suspicious,
)
from torchmn.doctor.network import Interface, NetworkFacts

GBIT = 1e9 / 8


def link(
    source: str,
    target: str,
    gbit: float = 1.0,
    *,
    network: str = "10.0.0.0/24",
    interface: str = "eth0",
    nominal: float = 0.0,
    latency_s: float = 1e-4,
    lost: float = 0.0,
    error: str = "",
) -> Link:
    return Link(
        source=source,
        target=target,
        network=network,
        interface=interface,
        address=f"{network[:6]}.{target}",
        is_named=network == "10.0.0.0/24",
        nominal_bytes_per_s=nominal * GBIT,
        measured=LinkMeasured(
            bytes_per_s=gbit * GBIT, latency_s=latency_s, retransmitted=lost, error=error
        ),
    )


def all_links(rate: Callable[[str, str], float], hosts: str = "abcd", **more: float) -> list[Link]:
    return [link(a, b, rate(a, b), **more) for a in hosts for b in hosts if a != b]  # type: ignore[arg-type]


def found_in(links: list[Link]) -> list[tuple[str, str]]:
    return [(finding.severity, ",".join(finding.hosts)) for finding in link_findings(links, {})]


def facts(host: str, other: str, **is_up: bool) -> NetworkFacts:
    """Of a host with two interfaces, of which names lead to the first."""
    return NetworkFacts(
        hostname=host,
        own_addresses=[f"10.0.0.{host}"],
        resolved={other: [f"10.0.0.{other}"]},
        routes={},
        interfaces=[
            Interface(
                name=name,
                address=f"{network}.{host}",
                network=f"{network}.0/24",
                mtu=1500,
                is_up=is_up.get(name, True),
            )
            for name, network in (("eth0", "10.0.0"), ("eth1", "10.0.1"))
        ],
        taken={},
    )


def only(links: list[Link]) -> Finding:
    (finding,) = link_findings(links, {})
    return finding


@pytest.mark.parametrize("hosts", ["ab", "abc", "abcdefgh"])
def test_links_that_differ_a_little_are_healthy(hosts: str) -> None:
    assert found_in(all_links(lambda a, b: 1.0 if a < b else 0.7, hosts)) == []


def test_a_host_that_sends_slowly() -> None:
    finding = only(all_links(lambda a, b: 0.3 if a == "b" else 1.0))
    assert (finding.severity, finding.hosts) == ("warning", ["b"])
    assert "0.3 Gb/s where b sends to a, c, d, other links 1" in finding.seen


def test_a_host_that_receives_slowly() -> None:
    finding = only(all_links(lambda a, b: 0.05 if b == "c" else 1.0))
    assert (finding.severity, finding.hosts) == ("error", ["c"])
    assert "c receives from a, b, d" in finding.seen


def test_a_host_that_is_slow_in_both_directions_is_named_once() -> None:
    assert found_in(all_links(lambda a, b: 0.3 if "b" in (a, b) else 1.0)) == [("warning", "b")]


def test_one_slow_pair_is_no_fault_of_a_host() -> None:
    finding = only(all_links(lambda a, b: 0.3 if (a, b) == ("c", "a") else 1.0))
    assert finding.hosts == ["c", "a"]


def test_of_two_hosts_the_slow_direction_is_named() -> None:
    finding = only(all_links(lambda a, b: 0.1 if a == "a" else 1.0, "ab"))
    assert "a sends to b" in finding.seen


def test_all_links_below_the_speed_of_their_adapters() -> None:
    finding = only(all_links(lambda a, b: 0.04, nominal=10.0))
    assert (finding.severity, finding.hosts) == ("error", ["a", "b", "c", "d"])
    assert finding.seen == "eth0 carries 0.04 of 10 Gb/s between all hosts (a, b, c, d)"


def test_without_a_nominal_speed_equal_links_are_healthy() -> None:
    assert found_in(all_links(lambda a, b: 0.04)) == []


def test_a_host_that_cannot_be_connected_to() -> None:
    links = [
        link(a, b, error="timed out" if "d" in (a, b) else "")
        for a in "abcd"
        for b in "abcd"
        if a != b
    ]
    finding = only(links)
    assert (finding.severity, finding.hosts) == ("error", ["d"])
    assert "timed out" in finding.seen


def test_long_round_trips_and_lost_packets() -> None:
    links = all_links(lambda a, b: 1.0)
    late = [link(x.source, x.target, latency_s=0.01) if x.source == "a" else x for x in links]
    assert found_in(late) == [("warning", "a")]
    lossy = [link(x.source, x.target, lost=0.1) if x.source == "b" else x for x in links]
    assert found_in(lossy) == [("warning", "b")]


def test_a_better_measurement_clears_a_link() -> None:
    links = all_links(lambda a, b: 0.1 if (a, b) == ("c", "a") else 1.0)
    (bad,) = suspicious(links)
    assert bad.key == ("c", "a", "10.0.0.0/24")
    again = better_link(bad, link("c", "a", 0.9))
    assert again.measured.bytes_per_s == 0.9 * GBIT
    assert better_link(link("c", "a", error="refused"), again) == again


def test_names_that_lead_to_the_slower_network() -> None:
    slow = all_links(lambda a, b: 0.04, "ab")
    fast = [
        link(a, b, 9.0, network="10.1.0.0/24", interface="eth1")
        for a, b in (("a", "b"), ("b", "a"))
    ]
    found = {
        host: msgspec.structs.replace(
            facts(host, other), routes={other: "eth0"}, taken={"gloo": "eth0", "NCCL": "eth0"}
        )
        for host, other in (("a", "b"), ("b", "a"))
    }
    (finding,) = link_findings([*slow, *fast], found)
    assert "lead to eth0, which carries 0.04 Gb/s, and eth1 is idle with 9 Gb/s" in finding.seen
    assert "GLOO_SOCKET_IFNAME=eth1" in finding.cure


def test_an_interface_that_is_down_is_measured_only_if_names_lead_there() -> None:
    request = Request(slots={"1": 1, "2": 1}, cwd="/")
    found = {"1": facts("1", "2"), "2": facts("2", "1", eth0=False, eth1=False)}
    (only_link,) = links_between("1", "2", found, request)
    assert (only_link.address, only_link.is_named) == ("10.0.0.2", True)
    found["2"] = facts("2", "1")
    assert [link.network for link in links_between("1", "2", found, request)] == [
        "10.0.0.0/24",
        "10.0.1.0/24",
    ]


# ---- rounds of pairs: each pair once, and no machine twice in a round ----


@pytest.mark.parametrize("num_hosts", [2, 3, 4, 7, 8, 31])
def test_each_pair_meets_once_in_as_few_rounds_as_possible(num_hosts: int) -> None:
    hosts = [f"n{number}" for number in range(num_hosts)]
    rounds = rounds_of(hosts, {host: host for host in hosts})
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    assert set(met) == set(map(frozenset, combinations(hosts, 2)))
    assert len(rounds) == num_hosts - 1 + num_hosts % 2
    for pairs in rounds:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)


def test_containers_of_one_machine_are_not_measured_at_once() -> None:
    hosts = ["a", "b", "c", "d"]
    machines = {"a": 1, "b": 1, "c": 2, "d": 3}
    rounds = rounds_of(hosts, machines)
    assert sorted(map(sorted, sum(rounds, []))) == sorted(map(list, combinations(hosts, 2)))
    for pairs in rounds:
        used = [machine for pair in pairs for machine in {machines[host] for host in pair}]
        assert len(used) == len(set(used))


def test_a_thousand_hosts_meet_eight_others_each() -> None:
    hosts = [f"n{number}" for number in range(1000)]
    rounds = rounds_of(hosts, {host: host for host in hosts}, max_rounds=8)
    assert [len(pairs) for pairs in rounds] == [500] * 8
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(set(met)) == 4000
