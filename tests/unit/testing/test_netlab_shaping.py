import pytest

from tests.netlab.shaping import tc_batch
from torchmn.cluster.network import rate_bytes_per_s
from torchmn.errors import UsageError


@pytest.mark.parametrize(
    ("rate", "bytes_per_s"),
    [
        ("1gbit", 125e6),
        ("2.5gbit", 312.5e6),
        ("100mbit", 12.5e6),
        ("64kbit", 8e3),
        ("800bit", 100.0),
    ],
)
def test_rates(rate: str, bytes_per_s: float) -> None:
    assert rate_bytes_per_s(rate) == bytes_per_s


@pytest.mark.parametrize(
    "rate", ["", "1", "1 gbit", "1Gb/s", "-1gbit", "0mbit", "1gbyte", "1gbit\nqdisc del"]
)
def test_refused(rate: str) -> None:
    with pytest.raises(UsageError, match="Write it as '1gbit'"):
        rate_bytes_per_s(rate)


def test_a_line_for_each_device() -> None:
    lines = tc_batch(["port0", "port1"], "100mbit").splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["qdisc", "replace", "dev", "port0"],
        ["qdisc", "replace", "dev", "port1"],
    ]
    assert all("tbf rate 100mbit burst 128kb latency 20ms" in line for line in lines)
    assert "tbf" not in tc_batch(["port0"], None)
