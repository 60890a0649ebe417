"""The variables that a script gets."""

from __future__ import annotations

import pytest

from torchmn.launch.rank_environment import script_environment
from torchmn.topology import CpuAssignment, assign_cpus, available_processors


@pytest.fixture
def share() -> CpuAssignment:
    return assign_cpus(available_processors(), intra_rank=0, intra_size=1)


def test_the_heap_is_kept_between_steps(share: CpuAssignment) -> None:
    env = script_environment({"PATH": "/usr/bin"}, share, {}, None)
    assert int(env["MALLOC_TRIM_THRESHOLD_"]) == 2**30
    assert int(env["MALLOC_MMAP_THRESHOLD_"]) == 2**25


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_settings_of_the_user_are_left_alone(share: CpuAssignment, name: str) -> None:
    env = script_environment({name: "x"}, share, {}, None)
    assert env[name] == "x"
    assert [other for other in env if other.startswith("MALLOC_")] in ([], [name])
