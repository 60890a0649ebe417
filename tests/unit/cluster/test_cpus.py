"""Cores: what is available, and equal shares of it."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cluster.test_memory import write
from torchmn.cluster.cpus import Processors, assign_cpus, available_processors, cpu_quota
from torchmn.errors import UsageError


def plain(num_cores: int, quota: float | None = None) -> Processors:
    return Processors(
        logical=tuple(range(num_cores)),
        physical=tuple((0, core) for core in range(num_cores)),
        quota=quota,
    )


@given(st.integers(1, 40), st.integers(1, 12))
def test_shares_are_equal_and_inside(num_cores: int, num_ranks: int) -> None:
    processors = plain(num_cores)
    shares = [
        assign_cpus(processors, intra_rank=rank, intra_size=num_ranks) for rank in range(num_ranks)
    ]
    assert len({len(share.cores) for share in shares}) == 1
    assert len({share.num_threads for share in shares}) == 1
    assert all(share.cores <= set(range(num_cores)) for share in shares)
    if num_cores >= num_ranks:
        assert frozenset().union(*(share.cores for share in shares)) == set(range(num_cores))
        assert sum(share.num_threads for share in shares) <= num_cores
        common = frozenset.intersection(*(share.cores for share in shares))
        assert num_ranks == 1 or len(common) == num_cores % num_ranks
    else:
        owners = [sum(core in share.cores for share in shares) for core in range(num_cores)]
        assert max(owners) - min(owners) <= 1


def test_threads_of_a_core_stay_together() -> None:
    """Numbers as on a common machine: 0..3 are the first threads of four cores, 4..7 the second."""
    processors = Processors(
        logical=(0, 4, 1, 5, 2, 6, 3, 7), physical=tuple((0, i // 2) for i in range(8))
    )
    share = assign_cpus(processors, intra_rank=1, intra_size=2)
    assert share.cores == {2, 6, 3, 7}
    assert share.num_threads == 2


def test_quota_limits_threads_and_not_cores() -> None:
    share = assign_cpus(plain(64, quota=8.0), intra_rank=0, intra_size=4)
    assert share.num_threads == 2
    assert len(share.cores) == 16
    assert assign_cpus(plain(64, quota=0.5), intra_rank=0, intra_size=4).num_threads == 1


@pytest.mark.parametrize("rank", [-1, 2, 3])
def test_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match="outside 0..1"):
        assign_cpus(plain(4), intra_rank=rank, intra_size=2)


def test_order_follows_sockets_and_cores(tmp_path: Path) -> None:
    for number, socket in enumerate((1, 0)):
        folder = f"sys/devices/system/cpu/cpu{number}/topology"
        ids = {f"{folder}/physical_package_id": f"{socket}\n", f"{folder}/core_id": "0\n"}
        write(tmp_path, ids)
    if not {0, 1} <= os.sched_getaffinity(0):
        pytest.skip(reason="this process may not use cores 0 and 1")
    order = available_processors(tmp_path).logical
    assert order.index(1) < order.index(0)


def test_quota_of_version_2_is_the_minimum_of_all_levels(tmp_path: Path) -> None:
    levels = {"": "max 100000", "a/": "150000 100000", "a/b/": "400000 100000"}
    files = {f"sys/fs/cgroup/{level}cpu.max": f"{text}\n" for level, text in levels.items()}
    write(tmp_path, {"proc/self/cgroup": "0::/a/b\n", **files})
    assert cpu_quota(tmp_path) == 1.5


@pytest.mark.parametrize(("quota_us", "quota"), [("250000", 2.5), ("-1", None)])
def test_quota_of_version_1(tmp_path: Path, quota_us: str, quota: float | None) -> None:
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n1:memory:/y\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": f"{quota_us}\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    write(tmp_path, files)
    assert cpu_quota(tmp_path) == quota
