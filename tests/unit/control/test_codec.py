"""Orders and replies keep their values, and anything else is an error."""

from __future__ import annotations

import pytest

from torchmn.control.codec import decode, encode
from torchmn.run.elastic.rendezvous import RendezvousStarted, ServeRendezvous
from torchmn.run.elastic.rendezvous_state import Limits
from torchmn.run.host_checks import HostFacts, ProbeHost
from torchmn.run.monitor.rank_monitor import Order

ORDER = ServeRendezvous(
    secret="s",
    host="n0",
    port=1,
    hosts=["n0", "n1"],
    limits=Limits(min_hosts=1, max_hosts=2, grace_s=3),
)


@pytest.mark.parametrize(
    "value",
    [
        ORDER,
        ProbeHost(cwd="/a\nb", script="\udcff.py"),
        HostFacts(versions={"torch": "2"}, port=3),
        RendezvousStarted(error="in use"),
        Order(rank=1, pid=2, server="a:1", secret="s", grace_s=0.5, descriptor=7),
    ],
)
def test_values_survive_as_one_line(value: object) -> None:
    line = encode(value)
    assert line.count(b"\n") == 1
    assert decode(line, type(value)) == value


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"\xff",
        b"[" * 9999,
        encode(RendezvousStarted()),
        encode(ORDER).replace(b'"port": 1', b'"port": "1"'),
        encode(ORDER).replace(b'"n1"', b"7"),
        encode(ORDER).replace(b'"max_hosts": 2', b'"max_hosts": null'),
        encode(ORDER).replace(b'"port"', b'"other"'),
    ],
)
def test_other_values_are_errors(line: bytes) -> None:
    with pytest.raises(ValueError, match="Not a message"):
        decode(line, ServeRendezvous)
