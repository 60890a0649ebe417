"""Rounds of pairs: each pair once, and no machine twice in a round."""

from __future__ import annotations

from itertools import combinations

import pytest

from torchmn.doctor.links import rounds_of


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
