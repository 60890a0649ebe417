"""Which of the launcher and the script's own process group says which rank a process is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchmn.cluster.launcher_env import LAUNCHERS
from torchmn.comm.transports.own_rank import is_adopted, own_place
from torchmn.errors import TopologyError


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in LAUNCHERS:
        for name in (*row.rank, *row.size, "SLURM_STEP_ID", "SLURM_STEPID"):
            monkeypatch.delenv(name, raising=False)


@contextmanager
def group(rank: int, size: int) -> Iterator[None]:
    """A default group of torch without other processes."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def launch(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


def test_nothing_says_that_a_process_is_one_of_several() -> None:
    assert own_place() is None
    with group(0, 1):
        assert own_place() is None


def test_a_group_of_several_is_adopted() -> None:
    with group(2, 4):
        place = own_place()
    assert place is not None
    assert (place.rank, place.size) == (2, 4)
    assert is_adopted(place)
    assert own_place() is None


def test_a_launcher_of_one_process_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As srun -n 1 of a script that starts its processes itself."""
    launch(monkeypatch, 0, 1)
    with group(1, 2):
        assert is_adopted(own_place())
    assert not is_adopted(own_place())


def test_the_launcher_counts_where_both_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, 1, 2)
    with group(1, 2):
        place = own_place()
    assert place is not None
    assert place.launcher == "torchrun"
    with group(0, 1):  # which a library has made for itself
        assert own_place() == place


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 4)])
def test_a_group_that_contradicts_the_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    launch(monkeypatch, 1, 2)
    with group(rank, size), pytest.raises(TopologyError) as caught:
        own_place()
    assert "torchrun says rank 1 of 2 (RANK=1, WORLD_SIZE=2)" in str(caught.value)
    assert f"init_process_group() says rank {rank} of {size}" in str(caught.value)


def test_processes_that_lightning_starts_have_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with group(1, 2):
        assert is_adopted(own_place())
    with pytest.raises(TopologyError, match="RANK is not set"):
        own_place()
    with group(0, 1), pytest.raises(TopologyError, match="RANK is not set"):
        own_place()
