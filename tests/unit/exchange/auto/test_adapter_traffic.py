"""Bytes and messages of a sum, by route; the bytes are those that test hosts have counted."""

from __future__ import annotations

import pytest

from torchmn.comm.create import ROUTES
from torchmn.errors import UnknownNameError, UsageError
from torchmn.exchange.auto.predict import ROUTES as MODELLED
from torchmn.exchange.auto.predict import crossing


@pytest.mark.parametrize(
    ("route", "num_hosts", "ranks_per_host", "megabytes"),
    [  # measured with 60 MB by bench_exchange.py
        ("hierarchical", 2, 1, 60.06),
        ("hierarchical", 4, 1, 90.20),
        ("hierarchical", 2, 2, 60.12),
        ("flat", 2, 2, 120.15),
    ],
)
def test_bytes_are_those_that_were_counted(
    route: str, num_hosts: int, ranks_per_host: int, megabytes: float
) -> None:
    across = crossing(route, num_hosts, ranks_per_host, is_encoded=False)
    assert across.share * 60 == pytest.approx(megabytes, rel=0.005)


def test_every_route_has_a_model() -> None:
    assert set(MODELLED) == set(ROUTES)
    for route in set(ROUTES) - {"single_node"}:
        assert crossing(route, 1, 4, is_encoded=False).share == 0.0
        assert crossing(route, 4, 2, is_encoded=True).num_rounds >= 2


def test_refused() -> None:
    with pytest.raises(UsageError, match="one host, not 2"):
        crossing("single_node", 2, 1, is_encoded=False)
    with pytest.raises(UnknownNameError, match="hierarchical"):
        crossing("straight", 2, 1, is_encoded=False)
